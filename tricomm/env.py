"""The only reader of the process environment. Every variable is `TRICOMM_*` unless it belongs to another project.

Read at each call, never cached: a test or a launcher may set a variable after `import tricomm`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from tricomm.errors import InvalidArgument

_ON = {"1", "true", "yes", "on"}
_OFF = {"", "0", "false", "no", "off"}


def text(name: str) -> str | None:
    """Value of `name`, or None if it is unset or empty."""
    return os.environ.get(name) or None


def flag(name: str) -> bool:
    """Value of `name` as a switch; raises `InvalidArgument` for anything that is neither on nor off."""
    value = os.environ.get(name, "").strip().lower()
    if value in _ON or value in _OFF:
        return value in _ON
    raise InvalidArgument(f"{name}={value!r} is neither on ({', '.join(sorted(_ON))}) nor off (0, false, no, off)")


def integer(name: str) -> int | None:
    """Value of `name` as an int, or None if it is unset; raises `InvalidArgument` for anything else."""
    value = text(name)
    if value is None:
        return None
    try:
        return int(value)
    except ValueError:
        raise InvalidArgument(f"{name}={value!r} is not an integer") from None


def default(name: str, value: str) -> None:
    """Set `name` for this process if it is unset, for a driver to read when it starts."""
    os.environ.setdefault(name, value)


@contextmanager
def without(name: str) -> Iterator[None]:
    """In this block, `name` is unset, for processes that are started there."""
    value = os.environ.pop(name, None)
    try:
        yield
    finally:
        if value is not None:
            os.environ[name] = value


def peer_access_disabled() -> bool:
    """True if the user forbids direct GPU peer access (NCCL's variable is honoured besides our own)."""
    return flag("TRICOMM_P2P_DISABLE") or flag("NCCL_P2P_DISABLE")


def gpu_memory() -> str:
    """How the user wants GPU memory to be shared: "descriptor", the default, "fabric" handles, or legacy CUDA "ipc"."""
    value = text("TRICOMM_CUDA_VMM")
    if value is None:
        return "descriptor"
    if value.strip().lower() == "fabric":
        return "fabric"
    try:
        return "descriptor" if flag("TRICOMM_CUDA_VMM") else "ipc"
    except InvalidArgument as error:
        raise InvalidArgument(f"{error}, nor fabric") from None


def hardware_queues() -> int:
    """How many hardware queues CUDA maps streams to: CUDA_DEVICE_MAX_CONNECTIONS, which the driver reads once."""
    given = text("CUDA_DEVICE_MAX_CONNECTIONS") or ""
    return int(given) if given.isdecimal() else 8


def multicast() -> bool:
    """False if the user wants no multicast memory, in which a switch adds and copies (NCCL's variable counts, too)."""
    return all(text(name) is None or flag(name) for name in ("TRICOMM_MULTICAST", "NCCL_NVLS_ENABLE"))


def share_device() -> bool:
    """True if the user wants several ranks on one GPU (NCCL's variable is honoured besides our own)."""
    return flag("TRICOMM_SHARE_DEVICE") or flag("NCCL_MULTI_RANK_GPU_ENABLE")


def batch_invariant() -> bool:
    """True if the user wants every group's reductions to depend on rank order alone."""
    return flag("TRICOMM_BATCH_INVARIANT")


def token() -> bytes | None:
    """Shared secret that authenticates the records of the rendezvous, or None."""
    value = text("TRICOMM_TOKEN")
    return value.encode() if value is not None else None
