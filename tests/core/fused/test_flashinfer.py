"""tricomm.flashinfer has FlashInfer's names, enum values and semantics, compared with the installed package if any."""

from __future__ import annotations

import inspect
import re
import warnings

import pytest
import torch

import tricomm
import tricomm.flashinfer as facade
from tests.core.fused import fused_reference as reference
from tricomm.errors import InvalidArgument

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


NAMES = {
    8: "kARResidualRMSNormPerTokenGroupFP8PackedQuant",
    9: "kARResidualRMSNormOutPerTokenGroupFP8PackedQuant",
    13: "unknown",
}
REFUSED = [
    *[
        ({"pattern": n}, rf"{n} \({k}\) is not covered; there is 0, 1, 2, 3, 4, 5, 10, 11, 6, 7, 12")
        for n, k in NAMES.items()
    ],
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
