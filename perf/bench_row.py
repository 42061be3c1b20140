"""A row of measurement. The columns of CSV files, the history's table and the keys of charts follow from its fields."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

OURS = "tricomm"  # the library with which the others are compared
PLACES = ("out_of_place", "in_place")
SCENE, LINE = "scene", "line"  # fields that select the chart, fields that select the curve in it


def _column(at: int, csv: str = "", chart: str = "", **more: Any) -> Any:
    """A field that is column number `at` of a CSV file, named `csv` there [default: as the field]."""
    return field(metadata={"at": at, "csv": csv, "chart": chart}, **more)


@dataclass(frozen=True)
class Measurement:
    """One (library, collective, kernel, type, mode, place, size): the columns of the history's table, in its order.

    `library` is tricomm or a library that is compared with it; `nbytes` is the size as nccl-tests counts it. Times are
    in microseconds, of the slowest rank: the median, the 99th per cent and the maximum of its calls; `skew_us` is the
    difference between the slowest and the fastest rank's median. `simulated` times are of Triton's interpreter on a CPU
    and say nothing about a GPU. `tile` is in 64-bit words.
    """

    library: str = _column(0, chart=LINE)
    collective: str = _column(1, chart=SCENE)
    algorithm: str = _column(2, chart=LINE)
    protocol: str = _column(3, chart=LINE)
    dtype: str = _column(4, chart=SCENE)
    op: str = _column(5, chart=SCENE)
    mode: str = _column(6, chart=SCENE)
    place: str = _column(18, chart=SCENE)
    nbytes: int = _column(7, "size_bytes")
    p50_us: float = _column(21)
    p99_us: float = _column(22)
    max_us: float = _column(23)
    skew_us: float = _column(24)
    simulated: bool = _column(10, chart=SCENE)
    blocks: int = _column(11, default=0)
    warps: int = _column(12, default=0)
    tile: int = _column(13, "tile_words", default=0)


@dataclass(frozen=True)
class BenchRow:
    """A row of `tricomm bench`, in place or out of place: a measurement that the history keeps, and more for CSV and
    JSON.

    Bandwidths are in 1e9 bytes per second. The fields that belong to a kernel are None for another library's call.
    """

    measured: Measurement
    count: int = _column(8)
    ranks: int = _column(9)
    input_bytes: int = _column(29)
    moved_bytes: float | None = _column(14, default=None)
    least_bytes: float | None = _column(15, default=None)
    hops: int | None = _column(16, default=None)
    barriers: int | None = _column(17, default=None)
    time_us: float = _column(19, default=0.0)
    avg_us: float = _column(20, default=0.0)
    slowest_rank: int = _column(25, default=0)
    algbw_gbs: float = _column(26, default=0.0)
    busbw_gbs: float = _column(27, default=0.0)
    wrong: int | None = _column(28, default=None)
    reason: str = _column(30, default="")

    def columns(self) -> dict[str, Any]:
        """The values by column, in the order of `CSV_HEADER`; in another library's row the columns of a kernel are
        None."""
        values = {name: getattr(self.measured if kept else self, attribute) for _, name, attribute, kept in _COLUMNS}
        if self.measured.library != OURS:
            values |= dict.fromkeys(_OF_KERNEL)
        return values

    def changed(self, **values: Any) -> BenchRow:
        """A copy with other values of some fields, the measurement's among them."""
        kept = {name: values.pop(name) for name in list(values) if name in MEASUREMENT}
        return replace(self, measured=replace(self.measured, **kept), **values)


MEASUREMENT = tuple(f.name for f in fields(Measurement))
_COLUMNS = sorted(
    (f.metadata["at"], f.metadata["csv"] or f.name, f.name, kind is Measurement)
    for kind in (Measurement, BenchRow)
    for f in fields(kind)
    if f.metadata
)
CSV_HEADER = tuple(name for _, name, _, _ in _COLUMNS)
_OF_KERNEL = ("blocks", "warps", "tile_words", "reason")
_OF_PLACE = CSV_HEADER[CSV_HEADER.index("place") + 1 : CSV_HEADER.index("wrong") + 1]


def chart_keys(role: str) -> tuple[str, ...]:
    """The fields of a measurement that are `SCENE` or `LINE` of a chart."""
    return tuple(f.name for f in fields(Measurement) if f.metadata["chart"] == role)


def to_json(rows: tuple[BenchRow, ...]) -> dict[str, Any]:
    """One record for a call's rows: their common values, and for each of `PLACES` the times, or None."""
    shared = {name: value for name, value in rows[0].columns().items() if name not in _OF_PLACE and value is not None}
    del shared["place"]
    places = {row.measured.place: {name: row.columns()[name] for name in _OF_PLACE} for row in rows}
    return shared | {place: places.get(place) for place in PLACES}
