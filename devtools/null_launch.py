"""A launch path without its last step: kernels are compiled and arguments are packed, but nothing is launched.

What remains is the host's part of a call. It can be compared with that of another library on any machine.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch._C._distributed_c10d import HashStore

from tricomm import Communicator, Options
from tricomm.core.group import Runtime
from tricomm.kernels import layout
from tricomm.kernels.launch import compiler, cuda_launcher, kernel_launch
from tricomm.options import digest_of
from tricomm.store.arenas.open_arena import open_arena
from tricomm.store.handshake import handshake


class NullBindings:
    """A stand-in for `cuda.bindings.driver`. Every call succeeds and does nothing."""

    CUstream = int

    cuCtxPushCurrent = staticmethod(lambda context: (0,))
    cuCtxPopCurrent = staticmethod(lambda: (0, 0))
    cuModuleLoadData = staticmethod(lambda image: (0, 1))
    cuModuleGetFunction = staticmethod(lambda module, name: (0, 2))
    cuLaunchKernel = staticmethod(lambda *arguments: (0,))


class NullDevice:
    """A stand-in for a GPU of architecture sm_90."""

    bindings: Any = NullBindings
    capability = 90
    name = "no device"
    context = 3

    def stream(self) -> int:
        return 0


class NullGpu:
    """A stand-in for `tricomm.gpu.Gpu`. Its functions are C functions, like torch's, and its streams have no work."""

    clock = time
    index = 0
    current_device = raw_stream = staticmethod(partial(operator.index, 0))
    capturing = staticmethod(partial(operator.truth, False))

    def stream(self) -> NullStream:
        return NullStream()

    def recorded(self, stream: Any = None, timing: bool = False) -> NullStream:
        return NullStream()

    def here(self) -> AbstractContextManager[None]:
        return nullcontext()

    def synchronize(self) -> None:
        pass


class NullStream:
    """A stream or an event without work."""

    cuda_stream = 0
    query = staticmethod(partial(operator.truth, True))


class NullRuntime(Runtime):
    """Ranks whose kernels are compiled for a GPU and never run."""

    def __init__(self, gpu: bool) -> None:
        self._gpu = NullGpu() if gpu else None

    def gpu(self, device: torch.device) -> Any:
        return self._gpu

    def bind(
        self, kernel: Any, blocks: int, constexprs: dict[str, Any], bits: int | None, aligned: bool,
        more: Sequence[int | torch.Tensor], group: kernel_launch.GroupArgument, timeout: float = 600.0,
    ) -> kernel_launch.BoundKernel:  # fmt: skip
        options = compiler.COMPILE_OPTIONS
        gpu = {**constexprs, **options, "LANES": 32 * options["num_warps"], "PTX": True, "BLOCK": 512}
        return cuda_launcher.make_launcher(kernel, blocks, gpu, bits, aligned, more, group, NullDevice())


def communicator(gpu: bool = True) -> Communicator:
    """A group of one rank on the CPU. Its calls do all work of the host except CUDA's part.

    Without `gpu`, calls do not use streams, and are timed by the host's clock.
    """
    options = Options(arena_bytes=1 << 20)
    plan, device = layout.plan(1, options.arena_bytes), torch.device("cpu")
    control = handshake(HashStore(), 0, 1, 60.0, digest_of(options, plan, "cpu"))
    arena = open_arena(control, plan.nbytes, device, 60.0)
    return Communicator._over(control, arena, plan, device, 60.0, options, NullRuntime(gpu))
