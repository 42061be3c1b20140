"""Communication kernels like those in public Triton code, each in a right version and with common mistakes.

No code is copied from the kernels that they are modelled on; each file says where its protocol is from. They were
written without knowledge of the detector. The constexpr BUG chooses a mistake; "" is the right version. `# @ mark` at
the end of a line names a line that a finding may have to name. Each file has a function that makes `fn(comm)` for
`tricomm.check`: calls one after another over the same memory, whose results `fn` checks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.explorer.public import common, fifo, grid, push
from tests.explorer.public.common import Mistake
from tricomm import Communicator


@dataclass(frozen=True)
class Family:
    """One protocol: `make(bug)` gives `fn(comm)`."""

    make: Callable[..., Callable[[Communicator], Any]]
    mistakes: tuple[Mistake, ...]


FAMILIES = {
    "push_gather": Family(push.push_gathers, push.MISTAKES),
    "queue": Family(fifo.queues, fifo.MISTAKES),
    "grid_sum": Family(grid.grid_sums, grid.MISTAKES),
}
_MARKS = {
    where: mark for module in (push, fifo, grid) for where, mark in common.marks(Path(module.__file__ or "")).items()
}


def body(family: str, bug: str = "") -> Callable[[Communicator], Any]:
    """`fn(comm)` of a family, named after the family and the mistake."""
    fn = FAMILIES[family].make(bug)
    fn.__qualname__ = f"{family} {bug}".strip()
    return fn


def marked(where: str) -> str:
    """The mark that a line (file:line) has, or `where`."""
    return _MARKS.get(where, where)
