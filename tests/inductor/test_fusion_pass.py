"""The pass on graphs that run as they are, without Inductor's code generation: it fuses them, or gives a reason."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

import tricomm
from tests import ranks
from tests.c10d.bodies.groups import ROUTES, default_group
from tests.inductor.graphs import SPELLED, compiled, data, norm, random_function, same, summed
from tricomm.errors import CollectiveMismatch, InvalidArgument

FUSED = "all_reduce_rms_norm"
ours = torch.ops.tricomm


def _later_users(x, r, w):
    new = r + summed(x)
    y = norm(new, w)[0]
    return y @ y.mT, new + y


def _in_place(x, r, w):
    r.add_(summed(x))
    return norm(r, w)[0]


def _twice(x, r, w):
    total = summed(x)
    return norm(total, w)[0], norm(total, w * 2)[0], total * 2


def _of_both(x, r, w):
    total = summed(x)
    return r + total, total, norm(r + total, w)[0]


def _writes_between(graph):
    """Put a write to the residual between the all-reduce and its users."""
    residual = [node for node in graph.nodes if node.op == "placeholder"][1]
    total = next(node for node in graph.nodes if "wait_tensor" in node.name)
    with graph.inserting_after(total):
        graph.call_function(torch.ops.aten.mul_.Tensor, (residual, 2))


def _without_aliases(graph):
    """As Inductor does before it calls passes."""
    for node in [node for node in graph.nodes if node.target == torch.ops.aten.alias.default]:
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)


def _quantized(suffix, *more):
    """`more`: how the static scale is used, if there is one."""

    def function(x, r, w):
        scale = [(w[:1].float() * 0 + 0.25)] * bool(more)
        return getattr(ours, f"rms_norm{suffix}")(r + summed(x), None, w, 1e-6, 0.5, *scale, *more[1:])

    return function


# name: (function, whether exact, the operator or a part of the reason)
CASES = {
    "residual added": (lambda x, r, w: norm(r + summed(x), w), True, FUSED),
    "sum first": (lambda x, r, w: norm(summed(x) + r, w), True, FUSED),
    "residual in the norm": (lambda x, r, w: norm(summed(x), w, r), True, FUSED),
    "no residual, norms of the sum": (_twice, True, FUSED),
    "views": (lambda x, r, w: norm(summed(x).view(2, 2, -1) + r.view(2, 2, -1), w), True, FUSED),
    "a dimension more": (lambda x, r, w: norm(summed(x)[None] + r[None], w), True, FUSED),
    "later users": (_later_users, True, FUSED),
    "residual in place": (_in_place, True, FUSED),
    "our all_reduce": (lambda x, r, w: norm(ours.all_reduce(x, "sum", "0") + r, w), True, FUSED),
    "fp8": (_quantized("_fp8", True), True, f"{FUSED}_fp8"),
    "fp8_per_token": (_quantized("_fp8_per_token"), True, f"{FUSED}_fp8_per_token"),
    "weight computed": (lambda x, r, w: norm(r + summed(x), w.float() + 1), True, FUSED),
    "the sum has a user": (_of_both, True, "has several users"),
    "the sum is returned": (lambda x, r, w: (norm(y := summed(x), w, r), y), True, "has several users"),
    "average": (lambda x, r, w: norm(r + summed(x, "avg"), w), True, "'avg'"),
    "another type": (lambda x, r, w: summed(x.double()), True, "float64"),
    "no norm": (lambda x, r, w: (r + summed(x)).relu(), True, "no norm that is known"),
    "nothing": (lambda x, r, w: summed(x), True, "no norm that is known"),
    "cast": (lambda x, r, w: norm((r.float() + summed(x).float()).bfloat16(), w), True, "no norm that is known"),
    "broadcast": (lambda x, r, w: norm(r[:1] + summed(x), w), True, "no norm that is known"),
    "scaled": (lambda x, r, w: norm(torch.add(r, summed(x), alpha=2), w), True, "no norm that is known"),
    "doubled": (lambda x, r, w: norm((y := summed(x)) + y, w), True, "no norm that is known"),
    "other rows": (lambda x, r, w: norm(summed(x).view(8, 10), w[:10]), True, "no norm that is known"),
    "several": (lambda x, r, w: norm(funcol.all_reduce_coalesced([x, r], "sum", "0")[0], w), True, "out-of-place"),
    "in place": (lambda x, r, w: (ours.all_reduce_(y := x * 2, "sum", "0"), norm(y, w))[1], True, "out-of-place"),
    "the weight is of the sum": (lambda x, r, w: norm(y := summed(x), y[0] * 1), True, "computed from the sum"),
    "the weight is of the new residual": (lambda x, r, w: norm(y := r + summed(x), y[0] * 1), True, "from the sum"),
    "residual not rounded": (lambda x, r, w: norm(r * 3 + summed(x), w), True, "before it is rounded"),
    "user not rounded": (lambda x, r, w: (norm(y := r + summed(x), w), y * 3), True, "before it is rounded"),
    "residual not rounded, allowed": (lambda x, r, w: norm(r * 3 + summed(x), w), False, FUSED),
    "user not rounded, allowed": (lambda x, r, w: (norm(y := r + summed(x), w), y * 3), False, FUSED),
    "spelled": (lambda x, r, w: SPELLED["llama"][0](r + summed(x), w), True, "spelled in torch"),
    "no weight": (lambda x, r, w: torch.nn.functional.rms_norm(summed(x), (20,)), False, "no norm that is known"),
    "columns": (lambda x, r, w: SPELLED["torch"][0](summed(x).mT, w[:4]), False, "no norm that is known"),
    "layer norm": (lambda x, r, w: torch.nn.functional.layer_norm(summed(x), (20,), w), False, "no norm"),
}


def _said(used):
    return [*used.fused.elements(), *(left.reason for left in used.left)]


def _result(call, inputs):
    """All results, and the inputs afterwards."""
    inputs = [x.clone() for x in inputs]
    return [call(*inputs), inputs]


def _tried(function, inputs, exact=True, **more):
    """The operators and reasons for `function`, and whether the results are the same without the pass."""
    used = tricomm.compile_pass(exact=exact)
    found = _result(compiled(function, used, **more), inputs)
    return _said(used), same(found, _result(compiled(function), inputs))


def decisions(rank, world_size, tell, url):
    """`_tried` in each case."""
    with default_group(rank, world_size, url):
        found = {name: _tried(function, data(), exact) for name, (function, exact, _) in CASES.items()}
        other = dist.new_group(backend="gloo")
        wrapped = tricomm.wrap(other)
        for name, group in (("another backend", other), ("wrapped", wrapped)):
            found[name] = _tried(lambda x, r, w: norm(r + funcol.all_reduce(x, "sum", group), w), data())  # noqa: B023
        found["training"] = _tried(CASES["residual added"][0], data(), is_inference=False)
        found["nvfp4"] = _tried(_quantized("_nvfp4", True, "swizzled_128x4"), data(hidden=48))
        as_halves = lambda x, r, w: norm(summed(x).view(torch.float16), w.half())  # noqa: E731
        found["bits as another type"] = _tried(as_halves, data(), change=_without_aliases)
        used = tricomm.compile_pass()
        compiled(CASES["residual added"][0], used, change=_writes_between)(*data())
        found["written"] = _said(used), True
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    url = f"file://{tmp_path_factory.mktemp('pass')}/store"
    return ranks.run(1, decisions, url, timeout=200)[0]


@pytest.mark.parametrize("name", CASES)
def test_a_graph_is_fused_or_left_with_the_reason(found, name):
    said, right = found[name]
    assert len(said) == 1 and right
    assert said[0] == CASES[name][2] if CASES[name][2].startswith(FUSED) else CASES[name][2] in said[0]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("nvfp4", f"{FUSED}_nvfp4"),
        ("wrapped", FUSED),
        ("another backend", "another backend"),
        ("training", "training"),
        ("written", "changes a tensor"),
        ("bits as another type", "no norm that is known"),
    ],
)
def test_groups_and_graphs(found, name, wanted):
    said, right = found[name]
    assert right and len(said) == 1 and wanted in said[0]


@ranks.each(2, [], timeout=200)
def test_norms_spelled_in_torch(rank, world_size, tell, url):
    """A norm that is spelled in torch gets the bits of ours, in each type and for odd rows."""
    wrong = []
    with default_group(rank, world_size, url):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            x, residual, weight = inputs = data(dtype, 37, rank)
            for name, (function, bias) in SPELLED.items():
                used = tricomm.compile_pass(exact=False)
                found = compiled(lambda x, r, w: (function(y := r + summed(x), w), y), used)(*inputs)  # noqa: B023
                wanted = ours.rms_norm(residual + summed(x), None, weight, 1e-6, bias)
                if _said(used) != [FUSED] or not same(found, wanted):
                    wrong.append((name, dtype, _said(used)))
    return wrong


def programs(rank, world_size, tell, url, seeds):
    """Random programs: those that lose a bit, and how many all-reduces were fused and left."""
    wrong, fused, left = [], 0, 0
    with default_group(rank, world_size, url):
        for seed in seeds:
            used = tricomm.compile_pass(exact=bool(seed % 2))
            function, inputs = random_function(seed), data(rank=rank)
            right = same(_result(compiled(function, used), inputs), _result(compiled(function), inputs))
            wrong += [] if right else [seed]
            fused, left = fused + used.fused.total(), left + len(used.left)
    return wrong, fused, left


@pytest.mark.parametrize(("first", "last"), [(0, 40), pytest.param(40, 240, marks=pytest.mark.exhaustive)])
def test_random_programs_keep_their_bits(url, first, last):
    (wrong, fused, left), other = ranks.run(2, programs, url, range(first, last), timeout=280)
    assert wrong == [] and other == ([], fused, left) and fused >= (last - first) / 4 and left


# A check: a case that is refused by it.
CHECKS = {
    "_check_users": CASES["the sum is returned"][0],
    "_check_order": CASES["the weight is of the new residual"][0],
}


def without(rank, world_size, tell, url, check):
    from tricomm.inductor import chains

    if check is not None:
        setattr(chains, check, lambda *given: None)
    found = []
    with default_group(rank, world_size, url):
        for function in CHECKS.values():
            before = sum(tricomm.stats()["gloo"].values())
            try:
                _, right = _tried(function, data(), exact=False)
            except RuntimeError:  # from lint: a node is used before it is computed
                right = False
            calls = sum(tricomm.stats()["gloo"].values()) - before
            found.append("right" if right and calls == 2 else f"{calls} calls" if right else "wrong")
    return found


@pytest.mark.parametrize(
    ("check", "wanted"),
    [(None, ["right", "right"]), ("_check_users", ["3 calls", "right"]), ("_check_order", ["right", "wrong"])],
)
def test_without_a_check_the_graph_is_wrong_or_reduces_twice(url, check, wanted):
    assert ranks.run(1, without, url, check) == [wanted]


@pytest.mark.parametrize("route", ROUTES)
@ranks.each(2, True)
def test_ranks_of_which_one_has_the_pass_raise(rank, world_size, tell, url, route):
    """Only rank 0 has the pass."""
    with default_group(rank, world_size, url, route):
        inputs = data(hidden=32, rank=rank)
        call = compiled(CASES["residual added"][0], tricomm.compile_pass() if rank == 0 else None)
        try:
            call(*inputs)
        except CollectiveMismatch as error:
            return FUSED in str(error)
    return "no error"


def test_the_pass_is_pickled_and_has_a_key_of_its_settings():
    used = tricomm.compile_pass()
    used.fused["all_reduce_rms_norm"] += 1
    again = pickle.loads(pickle.dumps(used))
    assert again.fused == used.fused and again.exact and again.uuid() == used.uuid()
    assert used.uuid() != tricomm.compile_pass(exact=False).uuid()
    with pytest.raises(InvalidArgument, match="exact=1"):
        tricomm.compile_pass(exact=1)


def test_inductor_is_imported_with_the_pass_alone():
    code = "import sys, torch, tricomm, tricomm.c10d; print('torch._inductor' in sys.modules); tricomm.compile_pass"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
