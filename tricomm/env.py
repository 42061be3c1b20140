"""The only reader of the process environment. Every variable is `TRICOMM_*` unless it belongs to another project.

Read at each call, never cached: a test or a launcher may set a variable after `import tricomm`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path

from tricomm.errors import InvalidArgument

_ON = {"1", "true", "yes", "on"}
_OFF = {"", "0", "false", "no", "off"}
_C_INTEGER = re.compile(r"\s*([+-]?)(?:0[xX]([0-9a-fA-F]+)|([0-9]+))")


def text(name: str) -> str | None:
    """Value of `name`, or None if it is unset or empty."""
    return os.environ.get(name) or None


def unknown(names: Container[str]) -> list[str]:
    """The variables of the environment that begin like tricomm's and are not in `names`."""
    return sorted(name for name in os.environ if name.startswith("TRICOMM_") and name not in names)


def beginning(*prefixes: str) -> dict[str, str]:
    """The variables of the environment that begin with one of these prefixes."""
    return {name: value for name, value in os.environ.items() if name.startswith(prefixes)}


def user_folder(variable: str, at_home: str) -> Path:
    """The folder "tricomm" in the directory that the XDG `variable` names, by default in `at_home` of the home
    directory."""
    return Path(text(variable) or os.path.expanduser(f"~/{at_home}")) / "tricomm"


def flag(name: str) -> bool:
    """Value of `name` as a switch; raises `InvalidArgument` for anything that is neither on nor off."""
    value = (text(name) or "").strip().lower()
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


def foreign(name: str, unset: int = 0) -> int:
    """Value of another library's variable, as C's `strtol` reads it, because NCCL does. 0 for a value that does not
    begin with an integer. Never raises, because an invalid value of that library's variable must not fail a group."""
    value = text(name)
    if value is None:
        return unset
    found = _C_INTEGER.match(value)
    if found is None:
        return 0
    sign, hexadecimal, digits = found.groups()
    number = int(hexadecimal[:16], 16) if hexadecimal else int(digits[:19])
    return -number if sign == "-" else number


def default(name: str, value: str) -> None:
    """Set `name` for this process if it is unset; for a driver, which reads it when it is initialised."""
    os.environ.setdefault(name, value)


@contextmanager
def without(name: str) -> Iterator[None]:
    """A context manager: inside, `name` is unset for processes that are started."""
    value = os.environ.pop(name, None)
    try:
        yield
    finally:
        if value is not None:
            os.environ[name] = value


def peer_access_disabled() -> str | None:
    """The variable, ours or NCCL's, by which the user forbids direct GPU peer access; None if neither is set."""
    if flag("TRICOMM_P2P_DISABLE"):
        return "TRICOMM_P2P_DISABLE"
    return "NCCL_P2P_DISABLE" if foreign("NCCL_P2P_DISABLE") else None


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
    """The number of hardware queues to which CUDA maps streams: CUDA_DEVICE_MAX_CONNECTIONS, which the driver reads
    once."""
    given = foreign("CUDA_DEVICE_MAX_CONNECTIONS")
    return given if given > 0 else 8


def multicast() -> bool:
    """False if the user has switched NVLS (multimem) off, by our variable or NCCL's."""
    own = text("TRICOMM_MULTICAST") is None or flag("TRICOMM_MULTICAST")
    return own and foreign("NCCL_NVLS_ENABLE", unset=1) != 0


def share_device() -> bool:
    """True if the user wants several ranks on one GPU, by our variable or NCCL's."""
    return flag("TRICOMM_SHARE_DEVICE") or foreign("NCCL_MULTI_RANK_GPU_ENABLE") != 0


def agent_store() -> bool:
    """True if torchrun hosts the store; torch accepts only this value."""
    return text("TORCHELASTIC_USE_AGENT_STORE") == "True"


def dependent_launch() -> bool:
    """False if the user has switched programmatic dependent launch off."""
    return text("TRICOMM_DEPENDENT_LAUNCH") is None or flag("TRICOMM_DEPENDENT_LAUNCH")


def compile_after_set_up() -> bool:
    """False if the user allows no call of any group to compile a kernel."""
    return text("TRICOMM_COMPILE_AFTER_SET_UP") is None or flag("TRICOMM_COMPILE_AFTER_SET_UP")


def batch_invariant() -> bool:
    """True if the user wants every group's reductions to depend on rank order alone."""
    return flag("TRICOMM_BATCH_INVARIANT")


def wire() -> str | None:
    """How the user wants the groups of this process to quantise on the links; None: not at all."""
    return text("TRICOMM_WIRE")


def logs_routing() -> bool:
    """True if rank 0 should print each distinct route of a call. Raises `InvalidArgument` for another value."""
    value = text("TRICOMM_LOG")
    if value not in (None, "routing"):
        raise InvalidArgument(f"TRICOMM_LOG={value!r}: routing is needed, or nothing")
    return value is not None


def recorded_calls(unset: int) -> int:
    """The number of calls per group that torch's flight recorder should keep. Raises `InvalidArgument`."""
    value = _first("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
    return unset if value is None else integer(value) or 0


def dump_prefix() -> str:
    """The path of a dump without the rank, from torch's variables; by default in torch's cache."""
    value = _first("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
    if value is not None:
        return os.environ[value]
    cache = text("XDG_CACHE_HOME") or f"{text('HOME') or '/tmp'}/.cache"
    return f"{cache}/torch/comm_lib_trace_rank_"


def dumps_on_fault() -> bool:
    """False if torch is told to dump no calls after a timeout or an error. Raises `InvalidArgument`."""
    value = (text("TORCH_NCCL_DUMP_ON_TIMEOUT") or "1").strip().lower()
    if value not in _ON | _OFF | {"y", "t", "n", "f"}:
        raise InvalidArgument(f"TORCH_NCCL_DUMP_ON_TIMEOUT={value!r} is neither on (1) nor off (0)")
    return value not in _OFF | {"n", "f"}


def includes_stacks() -> bool:
    """Whether the stacks of calls are recorded. torch records them by default, in C++; tricomm only on request."""
    return (text("TORCH_INCLUDE_STACK_TRACE") or "").strip().lower() in _ON | {"y", "t"}


def _first(*names: str) -> str | None:
    """The first of these variables that is set."""
    return next((name for name in names if text(name) is not None), None)


def token() -> bytes | None:
    """Shared secret that authenticates the records of the rendezvous, or None."""
    value = text("TRICOMM_TOKEN")
    return os.fsencode(value) if value is not None else None
