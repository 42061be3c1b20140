"""The pass in Inductor: with it and without it the same bits, on two and on four ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tricomm
from tests import ranks
from tests.c10d.bodies.groups import default_group
from tests.inductor.graphs import SPELLED, data, norm, same, summed

FUSED = "all_reduce_rms_norm"
ours = torch.ops.tricomm


def layers(x, residual, weight):
    """The end of layers, one after the other, in each form in which the pass finds them."""
    residual = residual + summed(x)
    y = norm(residual, weight)[0]
    residual = residual + summed((y * 2).view(2, 2, -1)).view(4, -1)
    y = norm(residual, weight)[0]
    y, residual = norm(summed(y.relu()), weight, residual)
    codes, scales, _ = ours.rms_norm_fp8_per_token(summed(y * y), None, weight, 1e-6, 1.0)
    more = summed(codes.to(x.dtype) * scales.to(x.dtype)) + residual
    codes, _ = ours.rms_norm_fp8(more, None, weight, 1e-6, 0.0, scales[0].clone())
    return codes, scales, more, residual


def users(x, residual, weight):
    """Inductor computes the product from a sum that it has not rounded."""
    new = residual + summed(x)
    return norm(new, weight)[0], new * 3


def others(x, residual, weight):
    """Without the copy that an all-reduce makes of `y`, Inductor computes the last product together with `other`, from
    a value that it has not rounded."""
    first = x.relu() + residual
    y = norm(first, weight)[0]
    total = summed(y)
    new = norm(total, weight)[1]
    other = (y + residual).relu() + first
    return norm(other, weight, first)[1], norm(new, weight, total)[0], (new + other) * 2


def compiled(function, used, **changes):
    from torch._inductor import config

    changes = {"post_grad_custom_post_pass": used, "fx_graph_cache": False, **changes}

    def run(*inputs):
        torch._dynamo.reset()
        with config.patch(changes), torch.no_grad():
            return torch.compile(function, fullgraph=True)(*inputs)

    return run


def bits(rank, world_size, tell, url, dtype):
    torch.set_num_threads(1)
    with default_group(rank, world_size, url):
        inputs = data(dtype, 37, rank)
        used = tricomm.compile_pass()
        right = same(compiled(layers, used)(*inputs), compiled(layers, None)(*inputs))
    return right, dict(used.fused), used.left


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, *(pytest.param(dtype, marks=pytest.mark.exhaustive) for dtype in (torch.float32, torch.float16))],
    ids=str,
)
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_bits_are_those_without_the_pass(url, world_size, dtype):
    fused = {FUSED: 3, f"{FUSED}_fp8_per_token": 1, f"{FUSED}_fp8": 1}
    assert ranks.run(world_size, bits, url, dtype, timeout=280) == [(True, fused, [])] * world_size


def twice(rank, world_size, tell, url, realized):
    """Whether a second compilation, which knows the operators, gives the bits of the first."""
    from torch._inductor import lowering

    torch.set_num_threads(1)
    with default_group(rank, world_size, url):
        if not realized:
            lowering.needs_realized_inputs.difference_update({ours.rms_norm.default})
        inputs = data(torch.bfloat16, 37, rank)
        return same(*(compiled(layers, None)(*inputs) for _ in range(2)))


@pytest.mark.parametrize("realized", [True, False])
def test_without_realized_operands_bits_depend_on_earlier_compilations(url, realized):
    assert ranks.run(1, twice, url, realized, timeout=280) == [realized]


def rounding(rank, world_size, tell, url, function, check, modes):
    """For (whether `check` is made, whether Inductor is told to round) of `modes`: what the pass has fused, and whether
    the bits are those without it."""
    from tricomm.inductor import chains

    torch.set_num_threads(1)
    found = []
    with default_group(rank, world_size, url):
        inputs = data(torch.bfloat16, 37, rank)
        rounds = {mode: {"emulate_precision_casts": mode} for _, mode in modes}
        wanted = {mode: compiled(function, None, **changes)(*inputs) for mode, changes in rounds.items()}
        whole = getattr(chains, check)
        for checks, mode in modes:
            setattr(chains, check, whole if checks else lambda *given: None)
            used = tricomm.compile_pass()
            found.append((used.fused, same(compiled(function, used, **rounds[mode])(*inputs), wanted[mode])))
    return [(fused.total(), right) for fused, right in found]


def test_without_the_check_of_rounding_bits_change(url):
    modes = (True, False), (False, False), (True, True)
    assert (
        ranks.run(2, rounding, url, users, "_check_bits", modes, timeout=280)
        == [[(0, True), (1, False), (1, True)]] * 2
    )


def test_without_the_check_of_other_kernels_their_bits_change(url):
    modes = (True, False), (False, False)
    assert ranks.run(1, rounding, url, others, "_check_others", modes, timeout=280) == [[(0, True), (1, False)]]


class Block(nn.Module):
    """The end of a layer with torch's own norm."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(37, eps=1e-6)

    def forward(self, x, residual):
        residual = residual + summed(x)
        return self.norm(residual), residual


@ranks.each(2, (True, 2, []), timeout=280)
def test_norms_of_torch_get_the_bits_of_ours(rank, world_size, tell, url):
    """Without `exact`."""
    torch.set_num_threads(1)
    with default_group(rank, world_size, url):
        x, residual, weight = data(torch.bfloat16, 37, rank)
        block = Block().bfloat16()
        block.norm.weight.data.copy_(weight)

        def both(x, residual):
            y, residual = block(x, residual)
            residual = residual + summed(y)
            return SPELLED["llama"][0](residual, weight), residual

        first = residual + summed(x)
        last = first + summed(norm(first, weight)[0])
        used = tricomm.compile_pass(exact=False)
        right = same(compiled(both, used)(x, residual), (norm(last, weight)[0], last))
    return right, used.fused.total(), used.left


@ranks.each(2, (True, True, 2), timeout=280)
def test_a_graph_for_training_is_left(rank, world_size, tell, url):
    """A graph for training is left, and has its gradients."""
    torch.set_num_threads(1)
    with default_group(rank, world_size, url):
        from torch._inductor import config

        gradients, reasons = [], []
        for used in (tricomm.compile_pass(exact=False), None):
            torch._dynamo.reset()
            inputs = [x.requires_grad_() for x in data(torch.float32, 37, rank)]
            with config.patch(post_grad_custom_post_pass=used, fx_graph_cache=False):
                torch.compile(lambda x, r, w: SPELLED["torch"][0](r + summed(x), w))(*inputs).sum().backward()
            gradients.append([x.grad for x in inputs])
            reasons += [left.reason for left in used.left] if used is not None else []
    return same(*gradients), all("training" in reason for reason in reasons), len(reasons)


def cached(rank, world_size, tell, url, folder):
    """A graph from Inductor's cache, in a process that has not compiled it."""
    import os

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    torch.set_num_threads(1)
    with default_group(rank, world_size, url):
        used = tricomm.compile_pass()
        inputs = data(torch.bfloat16, 37, rank)
        wanted = norm(inputs[1] + summed(inputs[0]), inputs[2])
        function = lambda x, r, w: norm(r + summed(x), w)  # noqa: E731
        return same(compiled(function, used, fx_graph_cache=True)(*inputs), wanted), used.fused.total()


def test_a_graph_from_the_cache_is_the_fused_one(url, tmp_path):
    said = [ranks.run(1, cached, f"{url}{n}", str(tmp_path / "cache"), timeout=280)[0] for n in (1, 2)]
    assert said == [(True, 1), (True, 0)]
