"""tricomm.flashinfer has FlashInfer's names, enum values and semantics, compared with the installed package if any."""

from __future__ import annotations

import importlib
import inspect
import re
import warnings

import pytest
import torch

import tricomm
import tricomm.flashinfer as facade
from tests.core.fused import fused_reference as reference
from tests.explorer.mutation import Edit, loaded
from tests.marks import some
from tricomm.core import launch_plan
from tricomm.core.fused import fused_call
from tricomm.core.fused.fused_call import FusedArguments
from tricomm.errors import InvalidArgument
from tricomm.explorer.memory_model.regions import OutOfBounds

PATTERN = facade.AllReduceFusionPattern
EPS = 1e-5


def workspace_of(comm, tokens=8, hidden=48, dtype=torch.bfloat16):
    make = facade.create_allreduce_fusion_workspace
    return make("auto", comm.world_size, comm.rank, tokens, hidden, dtype, group=comm)


@pytest.mark.parametrize("use_oneshot", [None, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_every_pattern_that_is_covered(use_oneshot):
    def body(comm):
        x, residual, weight = reference.inputs(comm.rank, 3, 48, torch.bfloat16)
        workspace = workspace_of(comm)
        common = {"residual_in": residual, "rms_gamma": weight, "rms_eps": EPS, "use_oneshot": use_oneshot}
        total = facade.allreduce_fusion(x, workspace, PATTERN.kAllReduce, use_oneshot=use_oneshot)
        out = torch.empty_like(x)
        more = {"norm_out": out, "weight_bias": 1.0, "fp32_acc": True}
        norm = facade.allreduce_fusion(x, workspace, PATTERN.kARResidualRMSNorm, True, False, **common, **more)
        assert norm is out
        results = {}
        for number in (2, 3, 4, 5, 10, 11):
            kept, new = torch.full_like(x, 77.0), torch.empty_like(x)
            scales = torch.full((8, 1) if number == 10 else (3,), 77.0)  # once for max_token_num, once for the tokens
            more = {"scale_factor": torch.tensor(0.5, dtype=torch.float64), "norm_out": kept, "residual_out": new}
            if number in (3, 5):
                scales = torch.full((1024 if number == 3 else 9,), 77, dtype=torch.uint8)
                more |= {"layout_code": None if number == 3 else facade.QuantizationSFLayout.LINEAR}
            if number not in (2, 4):
                more |= {"scale_out": scales}
            codes = facade.allreduce_fusion(x, workspace, number, **common, **more)
            results[number] = codes, scales, kept, new
        workspace.destroy()
        assert comm.all_reduce(torch.ones(2)).tolist() == [2, 2]  # the communicator is the caller's
        return total, norm, results, residual, weight

    exact = reference.summed(2, 3, 48, torch.bfloat16)
    for total, norm, results, residual, weight in tricomm.simulate(body, 2):
        assert torch.equal(total.double() + residual.double(), exact)
        assert reference.within_an_ulp(norm, reference.norm_of(exact, weight, EPS, 1.0))
        plain = results[4][2].double()
        assert reference.within_an_ulp(results[4][2], reference.norm_of(exact, weight, EPS))
        for number, (codes, scales, kept, new) in results.items():
            assert torch.equal(new.double(), exact)
            assert torch.equal(kept.double(), plain) if number in (4, 5, 11) else bool((kept == 77).all())
            if number in (2, 4):
                assert reference.rounded(codes.double(), plain / 0.5, reference.E4M3)
            elif number in (10, 11):
                assert (scales.view(-1)[3:] == 77).all()
                assert reference.rounded(codes.double(), plain / scales.view(-1)[:3, None].double(), reference.E4M3)
            else:
                values, wide = reference.nvfp4(codes, scales, "linear" if number == 5 else "swizzled_128x4")
                blocks = plain.view(3, 3, 16) * 0.5 / wide[..., None]
                assert reference.rounded(values.view(3, 3, 16), blocks, reference.E2M1)


def packed(tokens, groups, number=0x55555555):
    """A `scale_out` of patterns 8 and 9, poisoned, and the int32 that follow each other in its memory."""
    step, columns = -(-tokens // 4) * 4, -(-groups // 4)
    words = torch.full((step * columns,), number, dtype=torch.int32)
    return words.as_strided((tokens, columns), (1, step)), words


@pytest.mark.parametrize("use_oneshot", [None, pytest.param(False, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    ("tokens", "hidden", "size", "dtype"),
    some(
        [
            (5, 256, 16, torch.bfloat16),  # rows and bytes that are filled up
            (8, 512, 128, torch.bfloat16),
            (3, 48, 24, torch.float16),  # not in the fused kernel
            (1, 320, 64, torch.float32),
        ],
        2,
    ),
)
def test_scales_of_groups_are_packed_powers_of_two(tokens, hidden, size, dtype, use_oneshot):
    groups = hidden // size

    def body(comm):
        x, residual, weight = reference.inputs(comm.rank, tokens, hidden, dtype)
        weight[:size], weight[size : size + 2] = 0, 20  # a group of zeros, and another scale
        workspace = workspace_of(comm, tokens, hidden, dtype)
        common = {"residual_in": residual, "rms_gamma": weight, "rms_eps": EPS, "block_quant_group_size": size}
        results = []
        for number in (8, 9):
            scales, words = packed(tokens, groups)
            norm, new = torch.full_like(x, 77), torch.full_like(x, 77)
            codes = torch.full_like(x, 77).to(torch.float8_e4m3fn)
            more = {"scale_out": scales, "residual_out": new, "quant_out": codes, "norm_out": norm}
            assert facade.allreduce_fusion(x, workspace, number, **common, **more, use_oneshot=use_oneshot) is codes
            results.append((codes, words, norm, new))
        assert (results[0][2] == 77).all()
        plain = facade.allreduce_fusion(x, workspace, 1, residual_in=residual, rms_gamma=weight, rms_eps=EPS)
        assert torch.equal(results[1][2], plain)
        for a, b in zip(results[0], results[1], strict=True):
            assert a is results[0][2] or torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        return results[1]

    step = -(-tokens // 4) * 4
    for codes, words, norm, new in tricomm.simulate(body, 2):
        columns = words.view(-1, step).clone()
        columns[-1, tokens:] = 0  # memory of the test, not of the tensor
        assert (words.view(-1, step)[-1, tokens:] == 0x55555555).all() and not columns[:, tokens:].any()
        exponents = torch.stack(list(columns[:, :tokens]), -1).view(torch.uint8).view(tokens, -1)
        assert not exponents[:, groups:].any()
        scale = 2.0 ** (exponents[:, :groups, None].double() - 127)
        wide = norm.view(tokens, groups, size).double()
        largest = wide.abs().amax(-1, keepdim=True)
        assert ((largest <= 448 * scale) & ((largest > 224 * scale) | (largest == 0))).all()
        assert (scale[:, 0] == 2.0**-33).all() and not wide[:, 0].any()  # the power of two above 1e-10
        assert reference.rounded(codes.view(tokens, groups, size).double(), wide / scale, reference.E4M3)
        assert torch.equal(new.double(), reference.summed(2, tokens, hidden, dtype))


def grouped(comm):
    """(codes, memory of the scales) of groups of numbers of all kinds, by each fused kernel and by torch."""
    x, results = torch.zeros(6, 480), []
    if comm.rank:
        x = torch.randn(6, 480, generator=torch.Generator().manual_seed(1))
        x[torch.arange(4), torch.arange(4) * 40] = torch.tensor([torch.inf, torch.nan, 0.0, 3e38])
        x[4] *= 1e-30
    for algorithm, protocol in (("one_shot", "ll"), ("two_shot", "ll"), (None, "simple")):
        scales, words = packed(6, 30)
        asked = FusedArguments(x.bfloat16(), None, torch.ones(480).bfloat16(), EPS, scale_out=scales)
        call = fused_call.checked(asked, comm.device, group=16)
        assert bool(comm._internal.run_fused(call, algorithm, protocol)) == (protocol == "ll")
        results.append((call.quant_out.view(torch.uint8), words))
    return results


def wrong_groups(compiled=None):
    """Of the two fused kernels, how many differ from torch or between the ranks."""
    every = tricomm.simulate(grouped, 2, compiled=compiled)
    exact = every[0][2]
    return sum(not all(map(torch.equal, got, exact)) for results in every for got in results[:2])


def test_all_kernels_give_the_same_bits_of_groups():
    assert not wrong_groups()


@pytest.mark.exhaustive
def test_compiled_kernels_give_the_same_bits_of_groups():
    assert not wrong_groups("sm_90")


MUTANTS = {
    "a scale is rounded down": ("+ _MANTISSA) >> 23", "+ 0) >> 23"),
    "a scale may be less than 1e-10": ("_number(_LEAST_OF_GROUP))", "_number(1))"),
    "a scale is of the next group": (
        "+ tl.arange(0, GROUPS)\n            there",
        "+ tl.arange(0, GROUPS) + 1\n            there",
    ),
    "bytes without a group are left": ("tl.static_range(LEFT, 4 if LEFT else 0)", "tl.static_range(4, 4)"),
    "rows that fill a column are left": ("if number == rows - 1:", "if number == rows:"),
    "memory after the last column is written": ("range(COLUMNS - (0 if LEFT else 1))", "range(COLUMNS + 1)"),
}


@pytest.mark.parametrize("name", some(MUTANTS, 6))
def test_the_bits_of_groups_show_each_mistake(name, monkeypatch):
    with loaded((Edit("kernels/device/quantize.py", *MUTANTS[name]),)):
        changed = importlib.import_module(launch_plan.registry.__name__.split(".")[0] + ".device.epilogue")
        monkeypatch.setattr(launch_plan, "device", changed)
        if name.startswith("memory"):
            with pytest.raises(OutOfBounds, match="past the end"):
                wrong_groups()
        else:
            assert wrong_groups() == 4


REFUSED = [
    ({"pattern": 13}, r"13 \(unknown\) is not covered; there is 0, 1, 2, 3, 4, 5, 8, 9, 10, 11, 6, 7, 12"),
    ({"pattern": 8}, r"GroupFP8PackedQuant: block_quant_group_size=None: a divisor of hidden=48 is needed"),
    ({"pattern": 9, "block_quant_group_size": 32}, "block_quant_group_size=32: a divisor of hidden=48"),
    ({"pattern": 9, "block_quant_group_size": True}, "block_quant_group_size=True: a divisor of hidden=48"),
    ({"pattern": 9, "block_quant_group_size": 16}, "PackedQuant needs a scale_out, int32 of packed exponents"),
    (
        {"pattern": 8, "block_quant_group_size": 8, "scale_out": torch.zeros(3, 2).int()},
        r"scale_out: torch.int32 of shape \(3, 2\), strides \(2, 1\); int32 of shape \(3, 2\), strides \(1, 4\)",
    ),
    ({"pattern": 8, "block_quant_group_size": 8, "scale_out": packed(3, 2)[0]}, r"int32 of shape \(3, 2\), strides"),
    (
        {"pattern": 8, "block_quant_group_size": 8, "scale_out": packed(3, 6)[0].view(torch.float32)},
        "scale_out: torch.float32 of shape",
    ),
    ({"pattern": 8, "block_quant_group_size": 8, "scale_out": 1}, "scale_out"),
    ({"residual_in": None}, "kARResidualRMSNorm needs residual_in"),
    ({"pattern": 2}, "kARResidualRMSNormFP8Quant needs a scale_factor"),
    ({"pattern": 3, "scale_factor": 1.0, "layout_code": 1}, "SWIZZLED_8x4"),
    ({"input": torch.ones(9, 48).bfloat16()}, "9 tokens of 48 torch.bfloat16 are 864 bytes, it was made for 768"),
    ({"input": torch.ones(48).bfloat16()}, "tokens, hidden"),
    ({"input": torch.ones(48, 3).bfloat16().t(), "pattern": 0}, r"input has strides \(1, 3\)"),
    ({"pattern": [1]}, r"pattern \[1\] \(no number\) is not covered"),
    ({"pattern": 3, "scale_factor": 1.0, "layout_code": [1]}, r"layout_code=\[1\]"),
    ({"pattern": 10, "scale_out": torch.ones(2)}, r"scale_out: .*\(2,\); float32 of shape \(3, 1\)"),
    ({"workspace": object()}, "workspace is a object"),
]


def test_unsupported_patterns_are_refused_by_name():
    def body(comm):
        x, residual, weight = reference.inputs(comm.rank, 3, 48, torch.bfloat16)
        given = {
            "input": x,
            "workspace": workspace_of(comm),
            "pattern": 1,
            "residual_in": residual,
            "rms_gamma": weight,
        }
        texts = []
        for change, _ in REFUSED:
            with pytest.raises(InvalidArgument) as error:
                facade.allreduce_fusion(**given | change)
            texts.append(str(error.value))
        workspace = given["workspace"]
        fits = [
            workspace.is_buffer_size_sufficient(*shape)
            for shape in [
                (1, 8, 48, torch.bfloat16),
                (1, 4, 96, torch.bfloat16),
                (1, 8, 48, torch.float32),
                (2, 1, 8, torch.bfloat16),
                (1, 1, 8, torch.int32),
            ]
        ]
        workspace.destroy()
        with pytest.raises(ValueError, match="it was destroyed"):
            facade.allreduce_fusion(**given)
        return texts, fits

    ((texts, fits),) = tricomm.simulate(body, 1)
    assert all(re.search(words, text) for text, (_, words) in zip(texts, REFUSED, strict=True))
    assert fits == [True, True, False, False, False]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"backend": "mnnvl-cutedsl"}, "mnnvl-cutedsl"),
        ({"top_k": 2}, "with top_k"),
        ({"dtype": torch.int8}, "dtype="),
        ({"max_token_num": 0}, "max_token_num=0"),
        ({"rank": 1}, "this is rank 0 of 1"),
    ],
)
def test_an_invalid_workspace_is_refused(change, words):
    def body(comm):
        given = {"backend": "auto", "max_token_num": 1, "hidden_dim": 8, "dtype": torch.float32, "group": comm} | change
        with pytest.raises(InvalidArgument, match=words):
            facade.create_allreduce_fusion_workspace(**given)

    tricomm.simulate(body, 1)


def test_names_enums_and_signatures_match_the_installed_flashinfer():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of libraries that it imports
        theirs = pytest.importorskip("flashinfer.comm")

    def parameters(function):
        return [(p.name, p.kind, p.default) for p in inspect.signature(inspect.unwrap(function)).parameters.values()]

    def numbers(kind):
        return {name: value for name, value in vars(kind).items() if isinstance(value, int)}

    for name in ("AllReduceFusionPattern", "QuantizationSFLayout"):
        assert numbers(getattr(facade, name)) == numbers(getattr(theirs, name))
    for name in ("create_allreduce_fusion_workspace", "allreduce_fusion"):
        assert parameters(getattr(facade, name)) == parameters(getattr(theirs, name))
    for name in ("is_buffer_size_sufficient", "destroy"):
        ours, others = (getattr(m.AllReduceFusionWorkspace, name) for m in (facade, theirs))
        assert parameters(ours) == parameters(others)
