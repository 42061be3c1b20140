"""The table of a benchmark: nccl-tests' columns, with the kernel where that has the root."""

from __future__ import annotations

from typing import Any

from tricomm.perf.bench_row import PLACES

SIMULATED = "simulated: Triton's interpreter on a CPU"
_HALF = f"{'time':>10} {'algbw':>8} {'busbw':>8} {'#wrong':>7}"
_UNITS = f"{'(us)':>10} {'(GB/s)':>8} {'(GB/s)':>8} {'':>7}"
_SPREAD = f"{'p50':>10} {'p99':>10} {'max':>10} {'skew':>10} {'sent':>6} {'hops':>4}"
_SPREAD_UNITS = f"{'(us)':>10} {'(us)':>10} {'(us)':>10} {'(us)':>10} {'(opt.)':>6} {'':>4}"


def heading(header: dict[str, Any], settings: dict[str, Any]) -> list[str]:
    """Comment lines, from `# tricomm bench` down to the column names."""
    versions = ", ".join(f"{name} {value}" for name, value in header["versions"].items())
    names = f"{'type':>8} {'redop':>5} {'mode':>6} {'algorithm':>9} {'protocol':>8}"
    lines = [
        "tricomm bench" + (f" ({SIMULATED}; no time here says anything about a GPU)" if header["simulated"] else ""),
        f"device    {header['device']}",
        f"topology  {header['topology']}",
        f"ranks     {header['ranks']}, memory shared by {header['kind']}",
        f"versions  {versions}",
        f"calls     {settings['warmup']} warm-up, {settings['iters']} timed back to back; time is the slowest rank's",
        "spread    of the slowest rank's calls (in place where there is no other); skew: its median less the fastest's",
        "sent      bytes to and from peers over the least that any algorithm needs; hops: dependent one-way messages",
        f"check     {'2 calls of their own per row and place, exact' if settings['check'] else 'off'}",
        "",
        f"{'':>64}  {'out-of-place':^36}  {'in-place':^36}  {'spread':^43}",
        f"{'size':>12} {'count':>10} {names}  {_HALF}  {_HALF}  {_SPREAD}",
        f"{'(B)':>12} {'(elements)':>10} {'':>40}  {_UNITS}  {_UNITS}  {_SPREAD_UNITS}",
    ]
    return [f"# {line}".rstrip() for line in lines]


def line(row: dict[str, Any]) -> str:
    """One row, aligned under `heading`."""
    names = f"{row['dtype']:>8} {row['op']:>5} {row['mode']:>6} {row['algorithm']:>9} {row['protocol']:>8}"
    halves = "  ".join(_half(row[place]) for place in PLACES)
    spread = row["out_of_place"] or row["in_place"]
    times = " ".join(f"{_three(spread[name]):>10}" for name in ("p50_us", "p99_us", "max_us", "skew_us"))
    sent = f"{row['moved_bytes'] / row['least_bytes']:.2f}" if row.get("least_bytes") else "-"
    return (
        f"  {row['size_bytes']:>12} {row['count']:>10} {names}  {halves}  {times} {sent:>6} {row.get('hops', '-'):>4}"
    )


def _half(place: dict[str, Any] | None) -> str:
    if place is None:
        return f"{'-':>10} {'-':>8} {'-':>8} {'-':>7}"
    wrong = "n/a" if place["wrong"] is None else str(place["wrong"])
    return f"{_three(place['time_us']):>10} {_rate(place['algbw_gbs']):>8} {_rate(place['busbw_gbs']):>8} {wrong:>7}"


def _three(value: float) -> str:
    return f"{value:.2f}" if value < 1000 else f"{value:.1f}" if value < 1e6 else f"{value:.0f}"


def _rate(value: float) -> str:
    return f"{value:.2f}" if value >= 1 else f"{value:.4f}" if value >= 1e-3 else f"{value:.1e}"


def summary(header: dict[str, Any], rows: list[dict[str, Any]], checked: bool, wrong: int, planned: int) -> str:
    """The last line: how much was measured, and whether it was right. `planned` rows are the most there could be."""
    if not header:
        return "nothing was measured"
    kernels = len({(r["collective"], r["algorithm"], r["protocol"]) for r in rows})
    verdict = f"{wrong} wrong" if checked else "not checked"
    mark = f" ({SIMULATED})" if header["simulated"] else ""
    part = f" of {planned}" if len(rows) < planned else ""
    return f"{header['ranks']} ranks, {kernels} kernels, {len(rows)} rows{part}, {verdict}{mark}"
