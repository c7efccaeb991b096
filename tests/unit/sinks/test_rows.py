import pyarrow as pa
import pytest

from schemas.aggregation import count
from schemas.errors import SchemaMismatchError, SinkRejectedError
from streams.sinks.rows import check_rows, newest_rows
from tests.support.feature_rows import T0_US, make_rows, make_view

VIEW = make_view()


def test_the_newest_row_of_each_entity_is_kept_in_input_order() -> None:
    rows = make_rows(
        VIEW,
        [
            {"user_id": "b", "window_end": T0_US + 2, "clicks_5m": 1},
            {"user_id": "a", "window_end": T0_US, "pane_index": 1, "clicks_5m": 2},
            {"user_id": "a", "window_end": T0_US, "pane_index": 0, "source_offset": 9, "clicks_5m": 3},
            {"user_id": "b", "window_end": T0_US + 1, "pane_index": 5, "clicks_5m": 4},
            {"user_id": "c", "source_offset": 2**53 + 1, "clicks_5m": 5},
            {"user_id": "c", "source_offset": 2**53, "clicks_5m": 6},
        ],
    )
    assert newest_rows(rows, view=VIEW)["clicks_5m"].to_pylist() == [1, 2, 5]


def test_of_rows_that_are_equal_in_order_the_first_is_kept() -> None:
    rows = make_rows(VIEW, [{"clicks_5m": 1}, {"clicks_5m": 2}])
    assert newest_rows(rows, view=VIEW)["clicks_5m"].to_pylist() == [1]


def test_integer_entity_keys_are_told_apart() -> None:
    view = make_view(key="account")
    rows = make_rows(view, [{"account": 2**60}, {"account": 2**60 + 1}, {"account": 2**60, "source_offset": 1}])
    assert newest_rows(rows, view=view)["account"].to_pylist() == [2**60 + 1, 2**60]


def test_rows_without_a_column_are_refused() -> None:
    with pytest.raises(SchemaMismatchError, match="column `watermark` missing, expected timestamp"):
        check_rows(make_rows(VIEW, [{}]).drop_columns("watermark"), view=VIEW)


def test_rows_with_a_column_of_another_type_are_refused() -> None:
    rows = make_rows(VIEW, [{}])
    index = rows.schema.get_field_index("clicks_5m")
    with pytest.raises(SchemaMismatchError, match="column `clicks_5m` double, expected int64"):
        check_rows(rows.set_column(index, "clicks_5m", rows["clicks_5m"].cast(pa.float64())), view=VIEW)


def test_rows_of_another_definition_are_refused_with_the_remedy() -> None:
    other = make_view(features={"clicks_5m": count().over("10m")})
    with pytest.raises(SchemaMismatchError, match="raise the view's version"):
        check_rows(make_rows(other, [{}]), view=make_view(features={"clicks_5m": count().over("5m")}))


def test_rows_of_another_version_are_refused() -> None:
    with pytest.raises(SchemaMismatchError, match=r"view_version \[2\], expected 1"):
        check_rows(make_rows(make_view(version=2), [{}]), view=VIEW)


@pytest.mark.parametrize("column", ["user_id", "event_time", "window_end", "pane_index", "source_offset"])
def test_rows_without_entity_or_order_are_refused(column: str) -> None:
    with pytest.raises(SinkRejectedError, match=f"1 rows of view user_activity have no `{column}`"):
        check_rows(make_rows(VIEW, [{column: None}, {}]), view=VIEW)


def test_no_rows_are_fine() -> None:
    check_rows(VIEW.row_schema.empty_table(), view=VIEW)
