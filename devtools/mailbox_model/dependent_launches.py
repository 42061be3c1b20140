"""Launches that overlap: programmatic dependent launch.

A dependent launch may begin when each block of the previous launch has signalled or ended. Its `wait` returns when that
launch has ended. So the kernels' rule is: in every launch, every access comes after the wait. Then a launch ends after
all earlier ones. A kernel of another library that never waits breaks this order.

The user's tensor `x` and the epoch `n` of the group table are slots as well: each call reads both and writes both.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from devtools.mailbox_model.explore import LOSES, SAFE, WRONG, Block, Case, Kernel, Launch, Op, calls
from devtools.mailbox_model.plain_data import one_shot, staged, two_shot
from devtools.mailbox_model.words_with_flags import exchange, merged, two_hops_merged

BEGIN, WAIT, SIGNAL = (Op(kind, (), 0) for kind in ("dependent", "wait", "signal"))


def dependent(kernel: Kernel, rank: int, n: int, epoch: int, broken: str = "") -> Launch:
    """`kernel`, which has one block, as a dependent launch. `broken`: the step that is left out or taken before the
    wait."""
    tensor, counter = (rank, 0, rank, "x"), (rank, 0, rank, "n")
    loads = [Op("read", (counter,), epoch - 1), Op("read", (tensor,), epoch - 1)]
    stores = [Op("write", (tensor,), epoch), Op("write", (counter,), epoch)]
    [ops] = kernel(rank, n, epoch)
    pushes = [next(op for op in ops if op.kind == "write" and op.slots[0][0] != rank)]
    early: Block = {"loads": loads, "pushes": pushes}.get(broken, [])
    late = [op for op in [*loads, *ops, *stores] if op not in early]
    return [[BEGIN, *early, *[WAIT] * (broken != "no wait"), *[SIGNAL] * (broken != "no signal"), *late]]


def foreign(waits: bool) -> Launch:
    """A dependent launch of another library's kernel. It signals, and waits if `waits`."""
    return [[BEGIN, SIGNAL, *[WAIT] * waits]]


def cases() -> Iterator[Case]:
    kernels: dict[str, Kernel] = {
        "exchange": exchange,
        "merged": merged,
        "two hops": two_hops_merged,
        "one_shot": partial(one_shot, chunks=1),
        "two_shot": partial(two_shot, chunks=1),
        "staged": partial(staged, chunks=1),
    }
    for name, kernel in kernels.items():
        yield Case(f"dependent launches of {name}", SAFE, calls(2, *[partial(dependent, kernel)] * 4))
        for broken in ("no wait", "loads"):
            ranks = calls(2, *[partial(dependent, kernel, broken=broken)] * 2)
            yield Case(
                f"dependent launches of {name}; {broken.replace('loads', 'loads before the wait')}", WRONG, ranks
            )
    for name in ("exchange", "merged"):
        ranks = calls(2, *[partial(dependent, kernels[name], broken="pushes")] * 3)
        yield Case(f"dependent launches of {name}; a push before the wait", LOSES, ranks)
    mixed = [partial(dependent, kernel) for kernel in kernels.values()]
    yield Case("dependent launches of different kernels in turn", SAFE, calls(2, *mixed))
    for broken, waits, want in (("", True, SAFE), ("", False, WRONG), ("no signal", False, SAFE)):
        between = [
            [dependent(exchange, r, 2, 1, broken), foreign(waits), dependent(exchange, r, 2, 2, broken)]
            for r in range(2)
        ]
        name = f"another library's kernel that {'waits' if waits else 'never waits'} between dependent launches"
        yield Case(name + (f"; {broken}" if broken else ""), want, between)
