"""tricomm: single-node multi-GPU collectives whose device code is all Triton.

The way of a call: `Communicator.all_reduce` -> `selection` (a pure function) -> a cached launch plan -> one kernel of
`tricomm.kernels` -> peers' mailboxes in the arena that `tricomm.store` shares. `tricomm.perf` measures it from outside.
"""

from typing import TYPE_CHECKING

from tricomm import c10d as _c10d
from tricomm.c10d import ddp_hook, wrap
from tricomm.communicator import Communicator, init
from tricomm.core.symmetric import Symmetric
from tricomm.core.work import Work
from tricomm.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    GroupAborted,
    InvalidArgument,
    PeerDied,
    PeerStalled,
    RendezvousError,
    ResourceError,
    TricommError,
)
from tricomm.local import local
from tricomm.metrics.counters import Statistics, stats
from tricomm.options import Options
from tricomm.policy.selection import Choice

if TYPE_CHECKING:
    from tricomm.explorer import Finding, Report, check, simulate
else:  # when first asked for: what runs kernels on GPUs must not need greenlet
    _FROM_EXPLORER = {"Finding", "Report", "check", "simulate"}

    def __getattr__(name):
        if name not in _FROM_EXPLORER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from tricomm import explorer

        return getattr(explorer, name)

    def __dir__():
        return sorted(_FROM_EXPLORER.union(globals()))


__version__ = "0.1.0"

__all__ = [
    "Choice",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "Finding",
    "Communicator",
    "GroupAborted",
    "InvalidArgument",
    "Options",
    "PeerDied",
    "PeerStalled",
    "RendezvousError",
    "Report",
    "ResourceError",
    "Statistics",
    "Symmetric",
    "TricommError",
    "Work",
    "__version__",
    "check",
    "ddp_hook",
    "init",
    "local",
    "simulate",
    "stats",
    "wrap",
]

_c10d.register()  # dist.init_process_group("tricomm")
