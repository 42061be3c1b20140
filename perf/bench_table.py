"""The table of a benchmark: nccl-tests' columns, with the kernel where that has the root."""

from __future__ import annotations

from typing import Any

from tricomm.perf.bench_measure import PLACES

SIMULATED = "simulated: Triton's interpreter on a CPU"
_HALF = f"{'time':>10} {'algbw':>8} {'busbw':>8} {'#wrong':>7}"
_UNITS = f"{'(us)':>10} {'(GB/s)':>8} {'(GB/s)':>8} {'':>7}"


def heading(header: dict[str, Any], settings: dict[str, Any]) -> list[str]:
    """Comment lines, from `# tricomm bench` down to the column names."""
    versions = ", ".join(f"{name} {value}" for name, value in header["versions"].items())
    lines = [
        "tricomm bench" + (f" ({SIMULATED}; no time here says anything about a GPU)" if header["simulated"] else ""),
        f"device    {header['device']}",
        f"topology  {header['topology']}",
        f"ranks     {header['ranks']}, memory shared by {header['kind']}",
        f"versions  {versions}",
        f"calls     {settings['warmup']} warm-up, {settings['iters']} timed back to back; time is the slowest rank's",
        f"check     {'2 calls of their own per row and place, exact' if settings['check'] else 'off'}",
        "",
        f"{'':>57}  {'out-of-place':^36}  {'in-place':^36}",
        f"{'size':>12} {'count':>10} {'type':>8} {'redop':>5} {'algorithm':>9} {'protocol':>8}  {_HALF}  {_HALF}",
        f"{'(B)':>12} {'(elements)':>10} {'':>8} {'':>5} {'':>9} {'':>8}  {_UNITS}  {_UNITS}",
    ]
    return [f"# {line}".rstrip() for line in lines]


def line(row: dict[str, Any]) -> str:
    """One row, aligned under `heading`."""
    names = f"{row['dtype']:>8} {row['op']:>5} {row['algorithm']:>9} {row['protocol']:>8}"
    halves = "  ".join(_half(row[place]) for place in PLACES)
    return f"  {row['size_bytes']:>12} {row['count']:>10} {names}  {halves}"


def _half(place: dict[str, Any]) -> str:
    wrong = "n/a" if place["wrong"] is None else str(place["wrong"])
    return f"{_three(place['time_us']):>10} {_rate(place['algbw_gbs']):>8} {_rate(place['busbw_gbs']):>8} {wrong:>7}"


def _three(value: float) -> str:
    return f"{value:.2f}" if value < 1000 else f"{value:.1f}" if value < 1e6 else f"{value:.0f}"


def _rate(value: float) -> str:
    return f"{value:.2f}" if value >= 1 else f"{value:.4f}" if value >= 1e-3 else f"{value:.1e}"


def summary(header: dict[str, Any], rows: list[dict[str, Any]], checked: bool, wrong: int) -> str:
    """The last line: how much was measured, and whether it was right."""
    kernels = len({(r["collective"], r["algorithm"], r["protocol"]) for r in rows})
    verdict = f"{wrong} wrong" if checked else "not checked"
    mark = f" ({SIMULATED})" if header["simulated"] else ""
    return f"{header['ranks']} ranks, {kernels} kernels, {len(rows)} rows, {verdict}{mark}"
