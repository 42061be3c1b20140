"""Launching: refusals before anything runs, and the number of compiles of a kernel, by Triton's binder."""

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from tests.kernels.arenas import DATA_KERNELS
from tricomm.errors import InvalidArgument
from tricomm.kernels.collectives.barrier import barrier
from tricomm.kernels.launch.compiler import COMPILE_OPTIONS, extras, takes_counts
from tricomm.kernels.launch.kernel_launch import prepare
from tricomm.kernels.specialization import Specialization, specialized

CPU = torch.device("cpu")
CONSTEXPRS = {"WORLD_SIZE": 4, "BLOCK": 512, "LANES": 256, "PTX": True}


def specialisation(kernel, numel: int, call: int, offset: int = 0):
    """Triton's key of a kernel compiled for sm_90; needs no GPU."""
    function = kernel.function
    bind = create_function_from_signature(function.signature, function.params, make_backend(GPUTarget("cuda", 90, 32)))
    x, y, group = torch.zeros(16)[offset:], torch.zeros(16), torch.zeros(128, dtype=torch.int64)
    constexprs = {**CONSTEXPRS, "ALIGNED": offset == 0, **kernel.fixed}
    if kernel.reduces:
        constexprs |= {"OP": "sum", "ELEMENT": "float32"}
    further = [numel % 7 for _ in extras(function)]
    if takes_counts(function):  # constant: Triton specialises on a tuple's contents in any case, our launcher does not
        further += [(5, 6, 7, 8)] * 2
    constexprs = specialized(function.arg_names, constexprs, compiled=True)
    _, key, options = bind(x, y, group, numel, call, *further, **COMPILE_OPTIONS, **constexprs)
    return key, options


@pytest.mark.parametrize("kernel", DATA_KERNELS, ids=lambda k: k.name)
def test_one_compile_serves_all_sizes_and_calls(kernel):
    keys = [
        specialisation(kernel, numel, call)
        for numel, call in [(1, 1 << 32), (16, 5 << 32 | 7), (1000, 1), (1 << 31, 16), (1 << 40, 3 << 32)]
    ]
    assert all(key == keys[0] for key in keys)
    assert specialisation(kernel, 1000, 1, offset=1) != keys[0], "a misaligned tensor is another compile"


@pytest.mark.parametrize("grid", [(), (0,), (1, 1, 1, 1), "x", None, (1.5,), (True,), lambda meta: -1])
def test_an_invalid_grid_is_refused(grid):
    with pytest.raises(InvalidArgument, match="grid="):
        prepare(barrier, grid, (torch.zeros(128, dtype=torch.int64), 1), CONSTEXPRS, CPU)


def test_preparing_a_launch_runs_nothing():
    group = torch.zeros(128, dtype=torch.int64)
    prepare(barrier, 1, (group, 1), {**CONSTEXPRS, "num_warps": 4}, CPU)
    assert not group.any()


def test_a_shipped_kernels_constants_are_one_parameter_and_a_users_stay_as_they_are():
    ours = specialized(["group", "call", "SPEC"], {**CONSTEXPRS, "LL": True, "num_warps": 4})
    assert ours == {"SPEC": Specialization(4, 512, 256, True, LL=True), "num_warps": 4}
    for parameters, constexprs in (
        (["x_ptr", "BLOCK"], {"BLOCK": 16}),
        (["x_ptr", "SPEC", *CONSTEXPRS], {**CONSTEXPRS, "SPEC": 3}),
        (["x_ptr", "SPEC"], {"BLOCK": 16}),
    ):
        assert specialized(parameters, constexprs) == constexprs
