"""tricomm: single-node multi-GPU collectives whose device code is all Triton.

`Communicator.all_reduce` asks `policy.selection` (a pure function) for a kernel, keeps the launch plan, and launches
one kernel of `tricomm.kernels`, which writes to peers' mailboxes in the arena that `tricomm.store` shares.
`tricomm.perf` measures them.
"""

from typing import TYPE_CHECKING

from tricomm import torch_hook as _torch_hook

if TYPE_CHECKING:
    from tricomm.c10d.group_creation import ddp_hook, resume, shrink, suspend, wrap
    from tricomm.communicator import Communicator, init, join
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
    from tricomm.explorer import Finding, Report, check, checked, simulate
    from tricomm.inductor.fusion_pass import compile_pass
    from tricomm.local_ranks import local
    from tricomm.metrics.counters import Statistics, stats
    from tricomm.metrics.flight_recorder import dump
    from tricomm.options import Options
    from tricomm.policy.selection import Choice
else:  # imported on first use: the command line must not need torch, nor a GPU machine greenlet
    _MODULES = {
        "c10d.group_creation": "ddp_hook resume shrink suspend wrap",
        "communicator": "Communicator init join",
        "core.symmetric": "Symmetric",
        "core.work": "Work",
        "errors": "CollectiveMismatch CollectiveTimeout GroupAborted InvalidArgument PeerDied PeerStalled "
        "RendezvousError ResourceError TricommError",
        "explorer": "Finding Report check checked simulate",
        "inductor.fusion_pass": "compile_pass",
        "local_ranks": "local",
        "metrics.counters": "Statistics stats",
        "metrics.flight_recorder": "dump",
        "options": "Options",
        "policy.selection": "Choice",
    }
    _MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}

    def __getattr__(name):
        from importlib import import_module
        from importlib.util import find_spec

        if name in _MODULE_OF:
            value = globals()[name] = getattr(import_module(f"tricomm.{_MODULE_OF[name]}"), name)
            return value
        if not name.startswith("_") and find_spec(f"tricomm.{name}") is not None:
            return import_module(f"tricomm.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__():
        return sorted(_MODULE_OF.keys() | globals())


__version__ = "0.1.0"

__all__ = [
    "Choice",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "Communicator",
    "Finding",
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
    "checked",
    "compile_pass",
    "ddp_hook",
    "dump",
    "init",
    "join",
    "local",
    "resume",
    "shrink",
    "simulate",
    "stats",
    "suspend",
    "wrap",
]

_torch_hook.install()  # dist.init_process_group("tricomm")
