"""Legacy CUDA IPC in a fake process: blocks of cuMemAlloc, their handles, mappings of other processes' blocks."""

from __future__ import annotations

import ctypes
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.store.cuda.fake_bindings import Bindings


class CUipcMemHandle:
    def __init__(self) -> None:
        self._bytes = ctypes.create_string_buffer(64)

    def getPtr(self) -> int:
        return ctypes.addressof(self._bytes)


@dataclass(eq=False)
class Block:
    """One cuMemAlloc."""

    owner: Bindings
    gpu: int
    base: int
    data: bytearray
    live: bool = True
    mappings: Counter[int] = field(default_factory=Counter)  # by process number


@dataclass(eq=False)
class Mapping:
    """One cuIpcOpenMemHandle."""

    base: int
    block: Block
    gpu: int
    peer_access: bool
    live: bool = True
