from jobs.models_bench import Pair, choose


def pair(rows: int, in_flight: int, rows_per_s: float) -> Pair:
    return Pair(rows=rows, in_flight=in_flight, rows_per_s=rows_per_s)


def test_the_fastest_pair_is_chosen_where_no_other_is_nearly_as_fast():
    assert choose([pair(64, 1, 100), pair(1_024, 8, 1_000), pair(256, 4, 940)]) == pair(1_024, 8, 1_000)


def test_of_nearly_equal_pairs_the_one_with_the_fewest_rows_on_the_way_is_chosen():
    assert choose([pair(1_024, 8, 1_000), pair(512, 4, 960), pair(256, 4, 955)]) == pair(256, 4, 955)


def test_of_pairs_with_as_many_rows_on_the_way_the_faster_is_chosen():
    assert choose([pair(512, 2, 980), pair(256, 4, 1_000)]) == pair(256, 4, 1_000)
