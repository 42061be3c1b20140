"""The purpose of an access of a shipped kernel, by the source line that it was inlined from.

    body     a full tile of payload: must be 128 bits an access, in PTX and in SASS, if the tensors are aligned; 64 of
             a tensor under `ll128`, whose planes have one word a thread
    tail     the `else` branches of `packing.py` and what goes element by element: the rest after the last full tile,
             or misaligned tensors
    scalar   one word for the whole block (table entries, epoch), according to the TTGIR
    control  headers, polls of the control page, the clearing of an idle mailbox, lengths of rows: `primitives.py`,
             `mailbox.py`, `counts.py` and `arrival.py`, except `store_ll`, `get_ll` and `poll_planes`, whose accesses
             are payload; the scales of quantised codes, 16 bits for each 128 elements

Every other access counts as body, so that a new access must meet the requirement until it is listed here.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from tricomm.kernels import primitives
from tricomm.kernels.device import arrival, chunks, counts, mailbox, message_queues, packing, plain_data, planes, wire
from tricomm.perf.machine_code.accesses import Line

_SHARED = (primitives, arrival, chunks, mailbox, counts, packing, plain_data, message_queues, planes, wire)
_SCALES = ("wire._put_scales", "wire._get_scales", "planes.put_scales", "planes.see_scales")
_PAYLOAD = ("primitives.store_ll", "primitives.get_ll", "arrival.poll_planes")


def classify(line: Line, tiles: set[Line]) -> str:
    """body, tail, scalar or control: see the head of this file."""
    function = function_of(line)
    control = function.startswith(("mailbox.", "counts.", "primitives.", "arrival.")) and function not in _PAYLOAD
    if control or function in _SCALES:
        return "control"
    if line in _tail_lines():
        return "tail"
    return "body" if line in tiles or not line[1] else "scalar"


def clears(line: Line) -> bool:
    """True for code that runs once in 2^30 epochs or pieces, and is not counted in a call's cost."""
    return function_of(line) in ("mailbox.clear_idle", "mailbox.clear_runs", "message_queues.clear_stale")


def aside(line: Line) -> bool:
    """True for code that is no part of a kernel's steady loops: `clears`, the loop over chunks, and ends of runs that
    are no whole tiles."""
    return clears(line) or function_of(line).startswith("chunks.run_") or function_of(line).endswith("_ragged")


@cache
def _source(path: str) -> tuple[str, ast.Module]:
    return Path(path).stem, ast.parse(Path(path).read_text())


@cache
def function_of(line: Line) -> str:
    """`module.function` for a line of the shared device functions, else an empty string."""
    if line[0] not in (str(Path(module.__file__ or "").resolve()) for module in _SHARED):
        return ""
    stem, tree = _source(line[0])
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.lineno <= line[1] <= (node.end_lineno or 0):
            return f"{stem}.{node.name}"
    return ""


@cache
def _tail_lines() -> frozenset[Line]:
    path = str(Path(packing.__file__ or "").resolve())
    functions = {n.name: n for n in _source(path)[1].body if isinstance(n, ast.FunctionDef)}
    names = ("load_words", "store_words", "store_everywhere", "load_tile", "store_tile")
    branches = [i.orelse for name in names for i in functions[name].body if isinstance(i, ast.If) and i.orelse]
    branches += [functions[name].body for name in ("load_elements", "store_elements")]
    return frozenset((path, n) for b in branches for n in range(b[0].lineno, (b[-1].end_lineno or 0) + 1))


def place(line: Line) -> str:
    return f"{Path(line[0]).name or 'unknown'}:{line[1]}"
