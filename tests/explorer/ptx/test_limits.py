"""Launches that no GPU could run are refused by name, and those at the limits are not."""

import pytest

from tests.explorer.ptx.texts import module
from tricomm.errors import InvalidArgument
from tricomm.explorer.ptx.analysis.limits import capability, check_launch, static_shared
from tricomm.explorer.ptx.instructions import PtxKernel
from tricomm.explorer.ptx.text.parser import parse


def _kernel(directives: str = "", target: str = "sm_90a", body: str = "") -> PtxKernel:
    return parse(module(f"{body} ret;", ".param .b64 a", directives).replace("sm_90a", target))


@pytest.mark.parametrize(("target", "kib"), [("sm_80", 163), ("sm_90a", 227), ("sm_100a", 227), ("sm_120a", 99)])
def test_shared_memory(target, kib):
    kernel = _kernel(target=target, body=".shared .b8 x[3]; .shared .align 8 .b64 y;")
    assert static_shared(kernel) == 16
    check_launch(kernel, (1, 1, 1), (32, 1, 1), kib * 1024 - 16)
    with pytest.raises(InvalidArgument, match=rf"k: {kib * 1024 + 1:,} bytes .* {target}; there may be {kib * 1024:,}"):
        check_launch(kernel, (1, 1, 1), (32, 1, 1), kib * 1024 - 15)


def test_grids_and_blocks():
    for grid in ((2**31 - 1, 65535, 65535), (1, 1, 1)):
        check_launch(_kernel(), grid, (1024, 1, 1), 0)
    for grid in ((2**31, 1, 1), (1, 65536, 1), (1, 1, 65536), (0, 1, 1)):
        with pytest.raises(InvalidArgument, match="k: a grid of"):
            check_launch(_kernel(), grid, (32, 1, 1), 0)
    for threads in ((1025, 1, 1), (1, 1, 65), (0, 1, 1)):
        with pytest.raises(InvalidArgument, match="k: a block of"):
            check_launch(_kernel(), (1, 1, 1), threads, 0)
    with pytest.raises(InvalidArgument, match="k: 2,048 threads in a block; there may be 1,024"):
        check_launch(_kernel(), (1, 1, 1), (1024, 2, 1), 0)


def test_limits_that_a_kernel_declares():
    check_launch(_kernel(".reqntid 64, 2"), (1, 1, 1), (64, 2, 1), 0)
    with pytest.raises(InvalidArgument, match=r"a block of \(32, 1, 1\) threads; .reqntid asks for \(64, 1, 1\)"):
        check_launch(_kernel(".reqntid 64"), (1, 1, 1), (32, 1, 1), 0)
    with pytest.raises(InvalidArgument, match="2,048 threads in .reqntid; there may be 1,024"):
        check_launch(_kernel(".reqntid 2048"), (1, 1, 1), (1024, 1, 1), 0)
    with pytest.raises(InvalidArgument, match="128 threads in a block; there may be 64"):
        check_launch(_kernel(".maxntid 64"), (1, 1, 1), (128, 1, 1), 0)
    with pytest.raises(InvalidArgument, match="256 registers a thread in .maxnreg; there may be 255"):
        check_launch(_kernel(".maxnreg 256"), (1, 1, 1), (32, 1, 1), 0)


def test_registers():
    check_launch(_kernel(), (1, 1, 1), (256, 1, 1), 0, 255)
    check_launch(_kernel(), (1, 1, 1), (1024, 1, 1), 0, 64)
    with pytest.raises(InvalidArgument, match="k: 73,728 registers of a block; there may be 65,536"):
        check_launch(_kernel(), (1, 1, 1), (1024, 1, 1), 0, 65)
    with pytest.raises(InvalidArgument, match="k: 256 registers a thread; there may be 255"):
        check_launch(_kernel(), (1, 1, 1), (32, 1, 1), 0, 256)


def test_architectures():
    assert [capability(name) for name in ("sm_80", "sm_90", "sm_90a", "sm_100a")] == [80, 90, 90, 100]
    for name in ("sm_42", "sm_", "90", "sm_90x", "gfx942"):
        with pytest.raises(InvalidArgument, match=f"'{name}' is no architecture that Triton compiles for"):
            capability(name)
    with pytest.raises(InvalidArgument, match="'sm_42' is no architecture"):
        check_launch(_kernel(target="sm_42"), (1, 1, 1), (32, 1, 1), 0)
