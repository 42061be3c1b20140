"""The only access to NVIDIA's Python bindings (`cuda.bindings`); refuses versions that would stop the monitor.

Before 12.9.1, and before 13.0.0 in the CUDA 13 line, the bindings keep Python's GIL during a driver call. A call that
blocks (synchronise, free, unmap, load, a launch on a full queue) then stops every thread of the process, including the
monitor that ends kernels whose peer is gone, so both wait for each other for ever.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

from tricomm.errors import ResourceError

FIRST = (12, 9, 1)
NEEDED = "cuda-bindings>=12.9.1"
REMEDY = f"pip install '{NEEDED}'"
_FIRST_OF_LINES = {FIRST, (13, 0, 0)}  # a pre-release of one of these counts as an older version
INSTALL = "CUDA needs NVIDIA's driver (libcuda.so.1) on this machine and `pip install tricomm[cuda]`"
_VERSION = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?(?P<rest>.*)", re.DOTALL)
_PRE_RELEASE = re.compile(r"[._-]?(a|b|c|rc|alpha|beta|pre|preview|dev)[._-]?\d*", re.IGNORECASE)


def load_bindings(name: str) -> Any:
    """The module `cuda.bindings.<name>`, such as `driver`.

    Raises `ResourceError` if it cannot be imported, or if its version is refused (see `refusal`).
    """
    try:
        importlib.import_module("cuda.bindings")
        module = importlib.import_module(f"cuda.bindings.{name}")
    except ImportError as error:
        raise ResourceError(f"cuda.bindings cannot be imported ({error}); {INSTALL}") from None
    reason = refusal(bindings_version())
    if reason is not None:
        raise ResourceError(f"{reason}; {REMEDY}")
    return module


def bindings_version() -> str | None:
    """The version of the bindings that this process imports; None if there are none, "" if their version is unknown."""
    try:
        module = importlib.import_module("cuda.bindings")
    except ImportError:
        return None
    return str(getattr(module, "__version__", ""))


def refusal(version: str | None) -> str | None:
    """The reason why bindings of this version must not be used, with the version that is needed; None if they may.

    A version that cannot be read is refused, because it may not release the GIL. None (no bindings) is not
    refused here. A post-release or a local version counts as the version itself.
    """
    if version is None:
        return None
    match = _VERSION.match(version)
    if match is None:
        return f"the version of cuda-bindings cannot be read ({version!r}), and {NEEDED} is needed"
    number = (int(match[1]), int(match[2]), int(match[3] or 0))
    early = number in _FIRST_OF_LINES and _PRE_RELEASE.match(match["rest"]) is not None
    if number >= FIRST and not early:
        return None
    return (
        f"cuda-bindings {version} keeps Python's GIL during driver calls, which stops the watch over peers; "
        f"{NEEDED} is needed"
    )
