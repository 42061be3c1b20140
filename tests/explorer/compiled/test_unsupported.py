"""Matrix instructions of warp groups, TMA, warp specialisation and clusters are refused with line and remedy, and what
the remedy says works."""

import re
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from triton.language import core
from triton.tools.tensor_descriptor import TensorDescriptor

import tricomm
from tests.explorer.ptx.execution.handwritten import kernel
from tricomm.errors import InvalidArgument
from tricomm.explorer.ptx.units import grid

SIZE = 64


@core.extern
def library_rank(_semantic=None):
    made = {(): ("library_rank", core.dtype("int32"))}
    return core.extern_elementwise("", "", [], made, is_pure=False, _semantic=_semantic)


@triton.jit
def calls_a_library(out):
    tl.static_print("compiled")
    tl.store(out, library_rank())


def calls():
    calls_a_library[(1,)](torch.zeros(1, dtype=torch.int32, device="cuda"))


def test_a_function_of_a_device_library_is_refused_with_line_and_name(capsys):
    launch = calls.__code__.co_firstlineno + 1
    with pytest.raises(
        InvalidArgument, match=rf"py:{launch}: kernel calls_a_library calls library_rank, a function of a"
    ):
        tricomm.simulate(calls, 1)
    assert "codegen error" not in capsys.readouterr().out


@triton.jit
def product(x_desc, y_desc, out, SPECIAL: tl.constexpr, SIZE: tl.constexpr):
    total = tl.zeros([SIZE, SIZE], tl.float32)
    for k in tl.range(0, SIZE, 32, warp_specialize=SPECIAL):
        total = tl.dot(x_desc.load([0, k]), y_desc.load([k, 0]), total)
    at = tl.arange(0, SIZE)
    tl.store(out + at[:, None] * SIZE + at[None, :], total)


@triton.jit
def plain_product(x, y, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    places = at[:, None] * SIZE + at[None, :]
    tl.store(out + places, tl.dot(tl.load(x + places), tl.load(y + places)))  # @ dot


@triton.jit
def copy_by_tma(x, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    desc = tl.make_tensor_descriptor(x, [SIZE, SIZE], [SIZE, 1], [SIZE, SIZE])  # @ descriptor
    tl.store(out + at[:, None] * SIZE + at[None, :], desc.load([0, 0]))


@triton.jit
def printing(out, SIZE: tl.constexpr):
    tl.device_print("size", SIZE)  # @ print
    tl.store(out, SIZE)


def launched(fn, architecture, descriptors=False, **options):
    """The result of a kernel over two matrices, and what it has to be."""

    def body(comm):
        x = (torch.arange(SIZE * SIZE).reshape(SIZE, SIZE) % 13 - 6).bfloat16()
        y = (torch.arange(SIZE * SIZE).reshape(SIZE, SIZE) % 11 - 5).bfloat16()
        out = torch.full((SIZE, SIZE), float("nan"))
        given = [x, y]
        if descriptors:
            given = [TensorDescriptor.from_tensor(x, [SIZE, 32]), TensorDescriptor.from_tensor(y, [32, SIZE])]
        comm.launch(fn, 1, *given, out, SIZE=SIZE, **options)
        return out, x.float() @ y.float()

    return tricomm.simulate(body, 1, compiled=architecture)[0]


@pytest.mark.parametrize("special", [False, True])
def test_a_kernel_with_descriptors_is_exact_on_sm_80(special):
    got, wanted = launched(product, "sm_80", descriptors=True, SPECIAL=special, num_warps=4, num_stages=2)
    assert torch.equal(got, wanted)


def test_num_warps_below_a_warp_group_is_exact_on_sm_90():
    got, wanted = launched(plain_product, "sm_90", num_warps=2)
    assert torch.equal(got, wanted)


def line(mark):
    """file:line of a mark of this file."""
    lines = Path(__file__).read_text().splitlines()
    return re.escape(f"{__file__}:{next(n for n, text in enumerate(lines, 1) if text.endswith(f'# @ {mark}'))}")


def test_unsupported_features_of_a_kernel_are_refused_with_line_and_remedy():
    with pytest.raises(
        InvalidArgument, match=rf"{line('dot')}\): matrix instructions of a warp group.*--compiled sm_80"
    ):
        launched(plain_product, "sm_90", num_warps=4)
    with pytest.raises(InvalidArgument, match="product takes a tensor descriptor.*TMA.*--compiled sm_80"):
        launched(product, "sm_90", descriptors=True, SPECIAL=False)
    with pytest.raises(InvalidArgument, match="clusters of blocks are not simulated; take num_ctas=1"):
        launched(plain_product, "sm_90", num_warps=2, num_ctas=2)

    x = torch.zeros(SIZE, SIZE)
    with pytest.raises(InvalidArgument, match=rf"{line('descriptor')}\): TMA and its barriers: .*--compiled sm_80"):
        tricomm.simulate(lambda comm: comm.launch(copy_by_tma, 1, x, x, SIZE=SIZE), 1, compiled="sm_90")
    with pytest.raises(InvalidArgument, match=rf"{line('print')}\): calls of device functions: .*tl.device_print"):
        tricomm.simulate(lambda comm: comm.launch(printing, 1, x, SIZE=SIZE), 1, compiled="sm_90")


FEATURES = {
    "setmaxnreg.dec.sync.aligned.u32 24;": "warp specialisation: not simulated; .*warp_specialize=False",
    "wgmma.fence.sync.aligned;": "warp group: .*sm_80",
    "tcgen05.wait::ld.sync.aligned;": "warp group: .*sm_80",
    "barrier.cluster.arrive.aligned;": "clusters of blocks: .*num_ctas=1",
    "mapa.shared::cluster.u64 %rd1, %rd0, 0;": "clusters of blocks: .*num_ctas=1",
    "mbarrier.init.shared.b64 [%r0], 1;": "TMA and its barriers: .*sm_80",
    "cp.async.bulk.commit_group;": "TMA and its barriers: .*sm_80",
    "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%fd0, %fd1}, {%fd2}, {%fd3}, {%fd0, %fd1};": "f16, bf16",
}


@pytest.mark.parametrize("text", FEATURES)
def test_a_feature_is_named_with_a_remedy(text):
    with pytest.raises(InvalidArgument, match=rf"(?s)kernel k: .*PTX line.*{FEATURES[text]}"):
        grid.refuse_unknown(kernel(text))
