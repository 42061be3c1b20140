"""Compact forms (`COMPACT`: 128 registers a thread) have the results of the full ones, in several chunks and blocks."""

from functools import partial

import pytest

import tricomm
from tests.core.bodies.exact import Made, outcome
from tests.marks import compiles, most, some
from tricomm.kernels.collectives import registry
from tricomm.kernels.launch.compiler import COMPILE_OPTIONS
from tricomm.kernels.wide_words import why_not
from tricomm.options import tuned
from tricomm.perf.machine_code import accesses
from tricomm.perf.machine_code.kernel_report import ARCHITECTURES, Variant, compile_variant
from tricomm.policy.launch_shapes import COMPACT_REGISTERS, has_compact_form

PLAIN = [k for k in registry.KERNELS if k.protocol == "simple" and k.collective not in ("barrier", "all_to_all_v")]
SMALL = tuned(tricomm.Options(beside_compute=True, arena_bytes=1 << 16), blocks=2, tile=32)
COUNTS = (1, 2037)

QUICK = ("all_reduce_two_shot_simple", "broadcast_two_shot_simple", "all_to_all_one_shot_simple")  # every loop


def _wrong(kernel, comm):
    """Make two calls of each size; return the wrong ones and the registers of the kernel."""
    cases = [
        Made(kernel.collective, kernel.algorithm, kernel.protocol, "float32", "sum", count, 0, "out")
        for count in COUNTS * 2
    ]
    wrong = [case for number, case in enumerate(cases) if not outcome(comm, case, number)]
    chosen = comm.explain(kernel.collective, 8, algorithm=kernel.algorithm, protocol=kernel.protocol)
    return wrong, chosen.registers


@pytest.mark.parametrize(
    "kernel", some(PLAIN, lambda _, k: k.name in QUICK, lambda _, k: k.needs_cube), ids=lambda k: k.name
)
def test_a_compact_form_is_exact(kernel):
    world_size = 8 if kernel.needs_cube else 3
    assert (
        tricomm.simulate(partial(_wrong, kernel), world_size, options=SMALL) == [([], COMPACT_REGISTERS)] * world_size
    )


COMPILED = [
    (kernel, arch, world_size) if arch == "sm_90" else pytest.param(kernel, arch, world_size, marks=pytest.mark.soak)
    for world_size in (8, 4)
    for kernel in filter(compiles, registry.ALL)
    for arch in ARCHITECTURES
    if kernel.collective != "barrier" and has_compact_form(kernel, arch, world_size)
    if world_size == 8 or not has_compact_form(kernel, arch, 8)
    if not kernel.multicast or arch != "sm_80"  # no instructions for the switch
]


@pytest.mark.parametrize(
    ("kernel", "arch", "world_size"),
    some(COMPILED, lambda _, case: case[0].name == "all_reduce_two_shot_simple", most),
    ids=lambda value: getattr(value, "name", value),
)
@pytest.mark.skipif(why_not(90) is not None, reason="before Triton 3.9 some forms keep a few words on the stack")
def test_a_compact_form_has_128_registers_and_spills_nothing(kernel, arch, world_size, monkeypatch):
    block, warps = (128, 4) if kernel.protocol == "ll" else (512, 8)
    variant = Variant(kernel.name, arch, world_size=world_size, block=block, warps=warps)
    monkeypatch.setitem(COMPILE_OPTIONS, "maxnreg", COMPACT_REGISTERS)
    compiled = compile_variant(kernel.function, variant, {**kernel.fixed, "COMPACT": True})
    used = accesses.resources(compiled.asm["cubin"], accesses.disassemble(compiled.asm["cubin"]), 0)
    assert used.registers <= COMPACT_REGISTERS
    assert used.spill_loads + used.spill_stores == 0
