"""The features of the job as somebody would write them by hand, in DuckDB's SQL and in polars, over the same files.

Run as ``python -m jobs.bench.by_hand ENGINE OUTPUT FILE…``: reads archived records, writes one Parquet file of rows and
prints the seconds it took, less those of imports. It knows what the engine has to find out: that the records hold no
bad row and none that is late, that a minute never goes by without a row, and by how much the watermark trails.
"""

import sys
import time
from collections.abc import Callable, Sequence
from typing import Final

import polars as pl

from jobs.bench.job import OUT_OF_ORDERNESS_MS, SIZE_MS, SLIDE_MS

_TILES: Final = SIZE_MS // SLIDE_MS
COLUMNS: Final = (
    *("user_id", "source_offset", "pane", "window_end_ms"),
    *("count_5m", "sum_5m", "mean_5m", "max_5m", "entropy_3"),
)
_JSON: Final = '{"user_id":"VARCHAR","event_time":"BIGINT","category":"VARCHAR","amount":"DOUBLE"}'


def in_duckdb(files: Sequence[str], output: str) -> None:
    """Running totals of each minute, and of each row the newest of the five minutes that its window has."""
    import duckdb  # noqa: PLC0415 - of the two engines one is loaded

    # The newest three by event time as of each row: what the newest is not falls to the second, and so on.
    newest = "max({}) OVER (PARTITION BY u ORDER BY o)"
    lesser = "CASE WHEN {0} < {1} THEN {0} ELSE {1} END"
    before = "lag({}) OVER (PARTITION BY u ORDER BY o)"
    joins = "\n".join(
        f"ASOF LEFT JOIN tiles t{back} ON t{back}.u = w.u AND t{back}.tile = w.tile - {back} AND t{back}.o <= w.o"
        for back in range(_TILES)
    )
    every = range(_TILES)
    count = " + ".join(f"coalesce(t{back}.n, 0)" for back in every)
    total = " + ".join(f"coalesce(t{back}.s, 0)" for back in reversed(every))
    largest = ", ".join(f"t{back}.m" for back in every)
    duckdb.execute(f"""
        CREATE TEMP TABLE e AS
        SELECT p, o, j.user_id AS u, j.event_time AS t, j.category AS c, j.amount AS a,
               j.event_time // {SLIDE_MS} AS tile
        FROM (SELECT "partition" AS p, "offset" AS o, json_transform(decode("value")::JSON, '{_JSON}') AS j
              FROM read_parquet(?, hive_partitioning = true))
    """, [list(files)])  # fmt: skip  # noqa: S608 - made of constants
    duckdb.execute(f"""
        COPY (
        WITH closing AS (
            SELECT p, w // {SLIDE_MS} AS closed, min(o) AS o
            FROM (SELECT p, o, max(t) OVER (PARTITION BY p ORDER BY o) - {OUT_OF_ORDERNESS_MS} AS w FROM e)
            GROUP BY p, closed QUALIFY closed > min(closed) OVER (PARTITION BY p)
        ),
        tiles AS (
            SELECT u, tile, o, count(*) OVER r AS n, sum(a) OVER r AS s, max(a) OVER r AS m
            FROM e WINDOW r AS (PARTITION BY u, tile ORDER BY o)
        ),
        firsts AS (SELECT p, u, tile, min(o) AS first FROM e GROUP BY p, u, tile),
        wanted AS (
            SELECT u, o, tile, 'EARLY' AS pane FROM e
            UNION ALL
            SELECT DISTINCT f.u, k.o, k.closed - 1, 'ON_TIME'
            FROM closing k JOIN firsts f ON f.p = k.p AND f.tile BETWEEN k.closed - {_TILES} AND k.closed - 1
             AND f.first <= k.o
        ),
        r1 AS (SELECT u, o, t * 4194304::HUGEINT * 1024 + o AS r FROM e),
        r2 AS (SELECT *, {newest.format("r")} AS m1 FROM r1),
        r3 AS (SELECT *, {lesser.format("r", "b")} AS d1 FROM (SELECT *, {before.format("m1")} AS b FROM r2)),
        r4 AS (SELECT * EXCLUDE (b), {newest.format("d1")} AS m2 FROM r3),
        r5 AS (SELECT *, {lesser.format("d1", "b")} AS d2 FROM (SELECT *, {before.format("m2")} AS b FROM r4)),
        r6 AS (SELECT u, o, m1, m2, {newest.format("d2")} AS m3 FROM r5),
        named AS (SELECT u, t * 4194304::HUGEINT * 1024 + o AS r, c FROM e),
        three AS (
            SELECT r6.u, r6.o, a.c AS c1, b.c AS c2, d.c AS c3 FROM r6
            JOIN named a ON a.u = r6.u AND a.r = r6.m1
            LEFT JOIN named b ON b.u = r6.u AND b.r = r6.m2
            LEFT JOIN named d ON d.u = r6.u AND d.r = r6.m3
        )
        SELECT w.u AS user_id, w.o AS source_offset, w.pane, (w.tile + 1) * {SLIDE_MS} AS window_end_ms,
               {count} AS count_5m, {total} AS sum_5m, ({total}) / ({count}) AS mean_5m,
               greatest({largest}) AS max_5m,
               CASE WHEN c2 IS NULL THEN 0
                    WHEN c3 IS NULL THEN CASE WHEN c1 = c2 THEN 0 ELSE 1 END
                    WHEN c1 = c2 AND c2 = c3 THEN 0
                    WHEN c1 = c2 OR c2 = c3 OR c1 = c3 THEN log2(3) - 2 / 3
                    ELSE log2(3) END::DOUBLE AS entropy_3
        FROM wanted w
        {joins}
        ASOF JOIN three ON three.u = w.u AND three.o <= w.o
        ) TO '{output}' (FORMAT parquet, COMPRESSION zstd)
    """)  # noqa: S608 - made of constants


def in_polars(files: Sequence[str], output: str) -> None:
    """The same plan, in polars' expressions."""
    fields = {"user_id": pl.String, "event_time": pl.Int64, "category": pl.String, "amount": pl.Float64}
    raw = pl.scan_parquet(list(files), hive_partitioning=True).select("partition", "offset", "value").collect()
    parsed = raw["value"].cast(pl.String).str.json_decode(pl.Struct(fields)).struct.unnest()
    events = raw.select(p="partition", o="offset").hstack(parsed)
    events = events.rename({"user_id": "u", "event_time": "t", "category": "c", "amount": "a"})
    events = events.with_columns(tile=pl.col("t") // SLIDE_MS).sort("p", "o")
    del raw, parsed
    behind = pl.col("t").cum_max().over("p") - OUT_OF_ORDERNESS_MS
    closing = events.select("p", "o", closed=behind // SLIDE_MS).group_by("p", "closed").agg(pl.col("o").min())
    closing = closing.filter(pl.col("closed") > pl.col("closed").min().over("p"))
    firsts = events.group_by("p", "u", "tile").agg(first=pl.col("o").min())
    fired = closing.join(firsts, on="p").filter(
        pl.col("tile").is_between(pl.col("closed") - _TILES, pl.col("closed") - 1), pl.col("first") <= pl.col("o")
    )
    fired = fired.select("u", "o", tile=pl.col("closed") - 1, pane=pl.lit("ON_TIME")).unique()
    wanted = pl.concat([events.select("u", "o", "tile", pane=pl.lit("EARLY")), fired]).sort("o")
    a = pl.col("a")
    tiles = events.select(
        "u",
        "tile",
        "o",
        n=pl.int_range(1, pl.len() + 1).over("u", "tile"),
        s=a.cum_sum().over("u", "tile"),
        m=a.cum_max().over("u", "tile"),
    ).sort("o")
    for back in range(_TILES):
        shifted = tiles.select("u", "o", tile=pl.col("tile") + back, **{f"{x}{back}": x for x in ("n", "s", "m")})
        wanted = wanted.join_asof(shifted, on="o", by=["u", "tile"], check_sortedness=False)
    every = range(_TILES)
    wanted = wanted.select(
        *("u", "o", "pane", "tile"),
        count_5m=pl.sum_horizontal([f"n{back}" for back in every]),
        sum_5m=pl.sum_horizontal([f"s{back}" for back in reversed(every)]),
        max_5m=pl.max_horizontal([f"m{back}" for back in every]),
    )
    ranked = events.sort("u", "t", "o").with_columns(r=pl.int_range(pl.len()))
    categories, ranked = ranked["c"], ranked.select("u", "o", "r").sort("u", "o")

    def newest(column: str) -> pl.Expr:
        return pl.col(column).cum_max().forward_fill().over("u")

    ranked = ranked.with_columns(m1=newest("r")).with_columns(b=pl.col("m1").shift().over("u"))
    ranked = ranked.with_columns(d1=pl.when(pl.col("b").is_not_null()).then(pl.min_horizontal("r", "b")))
    ranked = ranked.with_columns(m2=newest("d1")).with_columns(b=pl.col("m2").shift().over("u"))
    ranked = ranked.with_columns(d2=pl.when(pl.col("b").is_not_null()).then(pl.min_horizontal("d1", "b")))
    three = ranked.select("u", "o", m1="m1", m2="m2", m3=newest("d2"))
    three = three.with_columns(**{f"c{n}": categories.gather(three[f"m{n}"]) for n in (1, 2, 3)})
    one, two, other = pl.col("c1"), pl.col("c2"), pl.col("c3")
    n_distinct = 1 + (two != one).cast(pl.Int64) + ((other != one) & (other != two)).cast(pl.Int64)
    bits = pl.when(two.is_null()).then(0.0).when(other.is_null()).then((one != two).cast(pl.Float64))
    bits = bits.when(n_distinct == 1).then(0.0).when(n_distinct == 2).then(pl.lit(3.0).log(2) - 2 / 3)
    three = three.select("u", "o", entropy_3=bits.otherwise(pl.lit(3.0).log(2))).sort("o")
    rows = wanted.join_asof(three, on="o", by="u", check_sortedness=False).select(
        *(pl.col("u").alias("user_id"), pl.col("o").alias("source_offset"), "pane"),
        ((pl.col("tile") + 1) * SLIDE_MS).alias("window_end_ms"),
        *("count_5m", "sum_5m", (pl.col("sum_5m") / pl.col("count_5m")).alias("mean_5m"), "max_5m", "entropy_3"),
    )
    rows.write_parquet(output, compression="zstd")


ENGINES: Final[dict[str, Callable[[Sequence[str], str], None]]] = {"duckdb": in_duckdb, "polars": in_polars}

if __name__ == "__main__":
    if sys.argv[1] == "duckdb":
        import duckdb  # noqa: F401 - before the clock starts
    started_s = time.perf_counter()
    ENGINES[sys.argv[1]](sys.argv[3:], sys.argv[2])
    print(time.perf_counter() - started_s)
