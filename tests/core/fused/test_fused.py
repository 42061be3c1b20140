"""all_reduce + residual + RMSNorm + quantisation of a communicator: numbers, shapes, aliases, refusals, mismatches."""

from __future__ import annotations

import re

import pytest
import torch

import tricomm
from tests.core.fused import fused_reference as reference
from tests.marks import some
from tricomm.core import launch_plan
from tricomm.errors import CollectiveMismatch, InvalidArgument

POISON = 77.0
ROUTES = pytest.mark.parametrize("protocol", [None, "simple"], ids=["fused", "unfused"])  # no fused kernel is simple


def on_all(body, world_size=2, **more):
    return tricomm.simulate(body, world_size, **more)


def poisoned(*shape, dtype):
    return torch.full(shape, POISON, dtype=torch.float32).to(dtype)


@pytest.mark.parametrize(
    ("dtype", "rows", "hidden", "bias"),
    [
        (torch.bfloat16, 3, 40, 0.0),
        *some([(torch.float16, 5, 8, 1.0), (torch.float32, 1, 1000, 1.0)], lambda *_: False),
        pytest.param(torch.bfloat16, 7, 4104, 1.0, marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.parametrize("world_size", [2, *[pytest.param(n, marks=pytest.mark.exhaustive) for n in (1, 3)]])
@ROUTES
def test_the_norm_is_within_an_ulp_of_the_exact_one(dtype, rows, hidden, bias, world_size, protocol):
    def body(comm):
        x, residual, weight = reference.inputs(comm.rank, rows, hidden, dtype)
        kept = x.clone(), residual.clone()
        norm_out, residual_out = poisoned(rows, hidden, dtype=dtype), poisoned(rows, hidden, dtype=dtype)
        result = comm.all_reduce_rms_norm(
            x, residual, weight, 1e-5, weight_bias=bias, norm_out=norm_out, residual_out=residual_out, protocol=protocol
        )
        assert result[0] is norm_out and result[1].data_ptr() == residual_out.data_ptr()
        assert torch.equal(x, kept[0]) and torch.equal(residual, kept[1])
        return result, weight

    results = on_all(body, world_size)
    total = reference.summed(world_size, rows, hidden, dtype)
    for (norm, residual), weight in results:
        assert torch.equal(residual.double(), total)
        assert reference.within_an_ulp(norm, reference.norm_of(total, weight, 1e-5, bias))
        assert torch.equal(norm, results[0][0][0])


@ROUTES
def test_the_sum_has_the_bits_of_all_reduce(protocol):
    def body(comm):
        x = torch.randn(3, 24, generator=torch.Generator().manual_seed(comm.rank)).bfloat16()
        alone = comm.all_reduce(x.clone())
        _, residual = comm.all_reduce_rms_norm(x, None, torch.ones(24), 1e-6, protocol=protocol)
        weight = torch.ones(24, dtype=x.dtype)
        work = comm.all_reduce_rms_norm(x, alone, weight, 1e-6, protocol=protocol, async_op=True)
        return alone, residual, work.wait()[1]

    for alone, residual, twice in on_all(body, 3):
        assert torch.equal(residual, alone) and torch.equal(twice, (2 * alone.float()).bfloat16())


@ROUTES
def test_results_may_be_written_over_the_inputs(protocol):
    def body(comm):
        x, residual, weight = reference.inputs(comm.rank, 5, 24, torch.float16)
        plain = comm.all_reduce_rms_norm(x, residual, weight, 0.5, protocol=protocol)
        y, other = x.clone(), residual.clone()
        in_place = comm.all_reduce_rms_norm(y, other, weight, 0.5, norm_out=y, residual_out=other, protocol=protocol)
        z = x.clone()
        into_x = comm.all_reduce_rms_norm(z, residual, weight, 0.5, residual_out=z, protocol=protocol)
        assert in_place[0] is y and in_place[1].data_ptr() == other.data_ptr()
        return plain, in_place, into_x

    for plain, *others in on_all(body):
        assert all(torch.equal(a, b) for other in others for a, b in zip(plain, other, strict=True))


def test_shapes_of_one_row_of_many_dimensions_and_of_no_rows():
    def body(comm):
        weight = torch.ones(8)
        one = comm.all_reduce_rms_norm(torch.ones(8), None, weight)
        many = comm.all_reduce_rms_norm(torch.ones(2, 3, 8), torch.zeros(2, 3, 8), weight)
        before = [sum(c.calls for c in comm.stats().calls)]
        none = comm.all_reduce_rms_norm_quantized(torch.ones(0, 8), None, weight, quantize="fp8_per_token")
        assert [sum(c.calls for c in comm.stats().calls)] == before
        return [*(t.shape for t in (*one, *many)), none.codes.shape, none.scales.shape, none.norm]

    shapes = [(8,), (8,), (2, 3, 8), (2, 3, 8), (0, 8), (0, 1), None]
    assert on_all(body) == [shapes, shapes]


@pytest.mark.parametrize("scale", [0.5, pytest.param(1 / 3, marks=pytest.mark.exhaustive)])
@ROUTES
def test_static_fp8_is_the_nearest_code_and_saturates(scale, protocol):
    def body(comm):
        x, residual, weight = reference.inputs(comm.rank, 4, 48, torch.bfloat16)
        weight[0] = 1000.0
        norm_out = poisoned(4, 48, dtype=x.dtype)
        given = torch.tensor([scale]) if comm.rank else scale
        out = poisoned(4, 48, dtype=torch.float8_e4m3fn)
        result = comm.all_reduce_rms_norm_quantized(
            x, residual, weight, quantize="fp8", scale=given, norm_out=norm_out, quant_out=out, protocol=protocol
        )
        assert result.codes is out and result.scales is None and result.norm is norm_out
        return result

    results = on_all(body)
    for codes, _, _, norm in results:
        assert reference.rounded(codes.double(), norm.double() / scale, reference.E4M3)
        assert codes.float().abs().max() == 448
        assert torch.equal(codes.view(torch.uint8), results[0].codes.view(torch.uint8))


@ROUTES
def test_fp8_with_a_scale_for_each_token(protocol):
    def body(comm):
        x, residual, weight = reference.inputs(comm.rank, 5, 48, torch.float32)
        x[2], residual[2] = 0, 0  # a row of zeros has the least scale
        norm_out = poisoned(5, 48, dtype=x.dtype)
        return comm.all_reduce_rms_norm_quantized(
            x,
            residual,
            weight,
            quantize="fp8_per_token",
            norm_out=norm_out,
            scale_out=torch.full((5, 1), POISON),
            protocol=protocol,
        )

    for codes, scales, _, norm in on_all(body):
        largest = norm.double().abs().amax(-1, keepdim=True)
        exact = (largest / 448).clamp(min=1 / (512 * 448))
        assert scales.shape == (5, 1) and torch.allclose(scales.double(), exact, rtol=1e-7, atol=0)
        assert reference.rounded(codes.double(), norm.double() / scales.double(), reference.E4M3)
        assert not codes[2].float().any()


@pytest.mark.parametrize(
    ("layout", "rows", "hidden", "protocol"),
    [
        ("swizzled_128x4", 130, 80, "simple"),
        ("linear", 3, 48, None),
        *[pytest.param("swizzled_128x4", n, 80, None, marks=[pytest.mark.exhaustive] * (n > 36)) for n in (35, 130)],
    ],
)
def test_scales_of_nvfp4_follow_the_layout(layout, rows, hidden, protocol):
    def body(comm):
        x, residual, weight = reference.inputs(comm.rank, rows, hidden, torch.bfloat16)
        weight[:16] = 0  # a block of zeros has scale 0
        return comm.all_reduce_rms_norm_quantized(
            x,
            residual,
            weight,
            quantize="nvfp4",
            scale=40.0,
            scale_layout=layout,
            norm_out=torch.empty_like(x),
            protocol=protocol,
        )

    for codes, scales, _, norm in on_all(body):
        values, result = reference.nvfp4(codes, scales, layout)
        blocks = norm.double().view(rows, hidden // 16, 16)
        assert reference.rounded(result, 40.0 * blocks.abs().amax(-1) / 6, reference.E4M3)
        factor = torch.where(result > 0, 40.0 / result, 0.0)[..., None]
        assert reference.rounded(values.view(blocks.shape), blocks * factor, reference.E2M1)
        assert not values.view(blocks.shape)[:, 0].any() and result[:, 1:].gt(0).all()
        if layout == "linear":
            assert scales.shape == (rows, hidden // 16)
        else:
            assert scales.shape == (-(-rows // 128) * 128, -(-hidden // 64) * 4)
            assert scales.view(torch.float8_e4m3fn).double().sum() == result.sum()  # the padding is 0


@ROUTES
def test_special_values_stay_in_their_row(protocol):
    def body(comm):
        x = torch.ones(6, 16)
        x[0, 3], x[1, 3], x[2], x[3] = float("nan"), float("inf"), 0, 2.0**60
        x[4], x[5] = 2.0**-60, 3.0
        weight = torch.ones(16)
        plain = comm.all_reduce_rms_norm(x, None, weight, 0.0, protocol=protocol)
        huge = comm.all_reduce_rms_norm(x, None, weight, 1e30, protocol=protocol)
        codes = comm.all_reduce_rms_norm_quantized(x, None, weight, 0.0, quantize="fp8_per_token", protocol=protocol)
        return plain, huge, codes

    for (norm, residual), (small, _), codes in on_all(body):
        assert norm[0].isnan().all() and residual[0].isnan().sum() == 1
        assert norm[1, 3].isnan() and not norm[1, torch.arange(16) != 3].any()
        assert norm[2].isnan().all()  # eps 0: zero times infinity
        assert torch.equal(norm[3:], torch.ones(3, 16))
        assert torch.equal(small[2], torch.zeros(16)) and torch.allclose(small[5], torch.full((16,), 6e-15))
        assert codes.codes[0].isnan().all() and torch.equal(codes.codes[3:].float(), torch.full((3, 16), 448.0))


def test_scales_may_start_at_any_address(monkeypatch):
    """Scales do not decide whether a kernel reads words of 16 bytes."""
    result, make = [], launch_plan.make_fused
    monkeypatch.setattr(launch_plan, "make_fused", lambda *given: result.append(given[3]) or make(*given))

    def body(comm):
        x, weight, scales = torch.ones(4, 32), torch.ones(32), torch.full((5,), 0.5)
        codes = comm.all_reduce_rms_norm_quantized(x, None, weight, 0.0, quantize="fp8", scale=scales[1]).codes
        comm.all_reduce_rms_norm_quantized(x, None, weight, 0.0, quantize="fp8_per_token", scale_out=scales[1:, None])
        comm.all_reduce_rms_norm(torch.ones(129)[1:].view(4, 32), None, weight)
        return codes.float(), scales

    ((codes, scales),) = on_all(body, 1)
    assert (codes == 2).all() and scales[0] == 0.5 and torch.allclose(scales[1:], torch.tensor(1 / 448))
    assert result == [True, True, False]


def _refused(**changes):
    """The message of a call of one rank with these changes; the group stays usable."""

    def body(comm):
        x = torch.ones(4, 32)
        given = {"x": x, "residual": torch.ones(4, 32), "weight": torch.ones(32), "eps": 1e-6}
        given |= {n: v(x) if callable(v) else v for n, v in changes.items()}
        call = comm.all_reduce_rms_norm_quantized if "quantize" in given else comm.all_reduce_rms_norm
        with pytest.raises(InvalidArgument) as error:
            call(given.pop("x"), given.pop("residual"), given.pop("weight"), given.pop("eps"), **given)
        comm.all_reduce_rms_norm(x, None, torch.ones(32))
        return str(error.value)

    return on_all(body, 1)[0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"x": torch.ones(4, 32, dtype=torch.float64)}, "float64 is not normalised; there is float32"),
        ({"x": torch.ones(32, 4).t()}, "x: strides .* have gaps"),
        ({"x": torch.tensor(1.0)}, r"\[\.\.\., hidden\] is needed"),
        ({"x": torch.ones(4, 0)}, "hidden 1 or more"),
        ({"x": [1.0]}, "x: a torch.Tensor is needed, found list"),
        ({"x": torch.ones(4, 32, device="meta")}, "meta tensor"),
        ({"residual": torch.ones(4, 31)}, r"residual: torch.float32 of shape \(4, 31\); float32 of shape \(4, 32\)"),
        ({"residual": torch.ones(4, 32).half()}, "residual: torch.float16"),
        ({"weight": torch.ones(16)}, r"weight: .*\(16,\)"),
        ({"weight": torch.ones(32).half()}, "weight: torch.float16 .* float32 of shape"),
        ({"weight": torch.ones(32, requires_grad=True)}, "weight: .* requires grad"),
        ({"eps": -1e-6}, "eps=-1e-06: 0 or more"),
        ({"eps": float("nan")}, "eps=nan: a finite number"),
        ({"eps": 1e300}, r"eps=1e\+300: a finite number is needed, in fp32 too"),
        ({"weight_bias": -1e39}, r"weight_bias=-1e\+39: a finite number"),
        ({"quantize": "fp8", "scale": 1e-60}, "scale=1e-60: a number over 0"),
        ({"quantize": "fp8", "scale": 10**400}, "scale=10+: a finite number"),
        ({"weight_bias": True}, "weight_bias=True: a finite number"),
        ({"norm_out": torch.empty(4, 33)[:, :32]}, "norm_out: strides"),
        ({"residual_out": lambda x: x.view(-1)[:128].view(4, 32), "norm_out": lambda x: x}, "overlaps norm_out"),
        ({"quantize": "int8"}, "quantize='int8'; there is fp8, fp8_per_token, nvfp4"),
        ({"quantize": "fp8"}, "scale=None"),
        ({"quantize": "fp8", "scale": 0.0}, "scale=0.0: a number over 0"),
        ({"quantize": "fp8", "scale": torch.ones(2)}, "one fp32 element"),
        ({"quantize": "fp8", "scale": 1.0, "scale_out": torch.ones(4, 1)}, "scale_out means nothing with"),
        ({"quantize": "fp8_per_token", "scale": 1.0}, "scale means nothing with quantize='fp8_per_token'"),
        ({"quantize": "fp8_per_token", "scale_out": torch.ones(4)}, r"scale_out: .*\(4,\); float32 of shape \(4, 1\)"),
        ({"quantize": "fp8_per_token", "quant_out": torch.ones(4, 32)}, "quant_out: .* float8_e4m3fn"),
        ({"quantize": "nvfp4", "scale": 1.0, "scale_layout": "8x4"}, "scale_layout='8x4'; there is swizzled_128x4"),
        ({"quantize": "nvfp4", "scale": 1.0, "scale_out": torch.ones(4, 2).byte()}, "512 bytes are needed"),
        ({"quantize": "nvfp4", "scale": 1.0, "x": torch.ones(4, 24)}, "nvfp4 needs a multiple of 16"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_by_name(changes, words):
    assert re.search(words, _refused(**changes))


@pytest.mark.parametrize(
    "change",
    [
        {"eps": 1e-5},
        *some([{"weight_bias": 1.0}, {"residual": None}, {"weight": torch.ones(32).half()}], lambda *_: False),
    ],
)
@ROUTES
def test_ranks_with_different_epilogues_are_named(change, protocol):
    def body(comm):
        given = {"x": torch.ones(4, 32).half(), "residual": torch.ones(4, 32).half(), "weight": torch.ones(32)}
        more = change if comm.rank else {}
        with pytest.raises(CollectiveMismatch) as error:
            comm.all_reduce_rms_norm(**given | {"eps": 1e-6, "protocol": protocol} | more)
        return str(error.value)

    for text in on_all(body):
        assert text.count("all_reduce_rms_norm(op=32,eps 1e-") == 2


@pytest.mark.parametrize("other", ["rows", "plain", "quantize"])
def test_ranks_that_make_other_calls_are_named(other):
    def body(comm):
        x, weight = torch.ones(4, 32), torch.ones(32)
        calls = {
            "rows": lambda: comm.all_reduce_rms_norm(torch.ones(8, 16), None, torch.ones(16)),
            "plain": lambda: comm.all_reduce(x),
            "quantize": lambda: comm.all_reduce_rms_norm_quantized(x, None, weight, quantize="fp8_per_token"),
        }
        with pytest.raises(CollectiveMismatch) as error:
            calls[other]() if comm.rank else comm.all_reduce_rms_norm(x, None, weight)
        return str(error.value)

    words = {"rows": "op=16,", "plain": "all_reduce(op=sum", "quantize": "fp8_per_token"}[other]
    assert all(words in text and "all_reduce_rms_norm(op=32," in text for text in on_all(body))


@ROUTES
def test_no_rows_on_one_rank_are_a_call_that_it_does_not_make(protocol):
    """As for every collective, the rank's next call is compared with the others' first one."""

    def body(comm):
        x = torch.ones(4 * (comm.rank != 1), 32)
        with pytest.raises(CollectiveMismatch) as error:
            comm.all_reduce_rms_norm(x, None, torch.ones(32), protocol=protocol)
            comm.barrier()
        return str(error.value)

    assert all("all_reduce_rms_norm(op=32," in text and "barrier" in text for text in on_all(body, 3))


def test_explain_and_the_counters_name_the_kernel():
    def body(comm):
        x, weight = torch.ones(4, 32), torch.ones(32)
        for protocol in (None, "simple", None):
            comm.all_reduce_rms_norm(x, None, weight, protocol=protocol)
        explained = [
            comm.explain("all_reduce_rms_norm", n * h * 4, x.dtype, hidden=h, protocol=protocol)
            for n, h, protocol in ((4, 32, None), (4, 32, "simple"), (4, 30, None))
        ]
        with pytest.raises(InvalidArgument, match="whole rows"):
            comm.explain("all_reduce_rms_norm", x.nbytes, x.dtype)
        with pytest.raises(InvalidArgument, match="quantize='x'"):
            comm.explain("all_reduce_rms_norm", x.nbytes, x.dtype, hidden=32, quantize="x")
        for top_k in (0, True, 2.0):
            with pytest.raises(InvalidArgument, match=f"explain: top_k={top_k}: 1 or more experts' rows"):
                comm.explain("all_reduce_rms_norm", x.nbytes, x.dtype, hidden=32, top_k=top_k)
            with pytest.raises(InvalidArgument, match="prepare: top_k"):
                comm.prepare("all_reduce_rms_norm", x.dtype, hidden=32, top_k=top_k)
        assert comm.explain("all_reduce_rms_norm", x.nbytes, x.dtype, hidden=32, top_k=8).fused
        assert comm.prepare("all_reduce_rms_norm", x.dtype, hidden=32, top_k=8) == 0  # interpreted
        with pytest.raises(InvalidArgument, match="rows of 24 elements; nvfp4 needs a multiple of 16"):
            comm.explain("all_reduce_rms_norm", 24 * 4, x.dtype, hidden=24, quantize="nvfp4")
        return explained, comm.stats().calls

    for (fused, forced, odd), calls in on_all(body):
        assert [(c.collective, c.algorithm, c.calls, c.nbytes) for c in calls] == [
            ("all_reduce_rms_norm", fused.counted_as, 2, 1024),
            ("all_reduce_rms_norm", forced.counted_as, 1, 512),
        ]
        assert fused.fused and not forced.fused and not odd.fused
        assert forced.counted_as == f"unfused_{forced.algorithm}" and fused.counted_as == fused.algorithm
        assert "not fused, an all_reduce and torch: there is no fused simple kernel; its" in forced.reason
        assert "not fused, an all_reduce and torch: hidden=30" in odd.reason


def test_more_than_one_schedule():
    def body(comm):
        x, residual, weight = reference.inputs(comm.rank, 2, 16, torch.bfloat16)
        norm, residual = comm.all_reduce_rms_norm(x, residual, weight)
        assert torch.equal(residual.double(), reference.summed(2, 2, 16, torch.bfloat16))

    report = tricomm.check(body, world_size=2, schedules=3)
    assert report.ok, report
