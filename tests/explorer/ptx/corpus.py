"""The PTX that this Triton generates for shipped and other kernels, compiled once a run; no assembler, no GPU."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from unittest.mock import patch

import triton
from triton.backends.nvidia.compiler import CUDABackend

from tricomm.explorer.ptx.instructions import PtxKernel
from tricomm.explorer.ptx.text.parser import parse
from tricomm.kernels.collectives import registry
from tricomm.perf.machine_code.kernel_report import Variant, compile_variant


@contextmanager
def without_assembler() -> Iterator[None]:
    """Triton stops at PTX and caches nothing, because a cached kernel would have no machine code."""
    with (
        tempfile.TemporaryDirectory() as folder,
        triton.knobs.cache.scope(),
        patch.object(CUDABackend, "make_cubin", lambda *args: b""),
    ):
        triton.knobs.cache.dir = folder
        yield


@cache
def shipped(variant: Variant) -> str:
    """PTX of a shipped kernel: `Variant("all_reduce_one_shot_ll", "sm_90", "float32", world_size=2)`."""
    kernel = next(k for k in registry.ALL if k.name == variant.kernel)
    with without_assembler():
        return str(compile_variant(kernel.function, variant, kernel.fixed).asm["ptx"])


@cache
def parsed(variant: Variant) -> PtxKernel:
    """`shipped`, parsed."""
    return parse(shipped(variant))
