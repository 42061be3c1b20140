"""The adapter for SGLang without SGLang: its hooks around fakes, and when it leaves SGLang unpatched."""

from __future__ import annotations

import logging
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tricomm.engines import sglang_all_reduce, sglang_plugin
from tricomm.engines.engine_group import Engine
from tricomm.engines.sglang_all_reduce import SglangAllReduce
from tricomm.engines.versions import VersionRange
from tricomm.errors import InvalidArgument

X = torch.ones(2, 8)


class _Group:
    """A fake EngineGroup that takes calls of at most eight elements a row."""

    comm = object()

    def takes(self, collective, x):
        return x.shape[-1] <= 8

    def takes_rms_norm(self, x, weight, eps):
        return x.shape[-1] <= 8

    def all_reduce(self, x):
        return x * 2

    def all_reduce_rms_norm(self, x, residual, weight, eps):
        return x * eps, residual

    def close(self):
        self.comm = None

    def suspend(self):
        self.steps.append("suspend")

    def resume(self):
        self.steps.append("resume")


def test_memory_is_freed_with_the_servers_first_part_and_mapped_with_its_last():
    _Group.steps = steps = []
    members = [SglangAllReduce(_Group(), name) for name in ("tp", "attention")]
    updater = SimpleNamespace(offload_tags={"weights", "kv_cache"})

    def own(updater, request, *, done):
        steps.append(request)
        updater.offload_tags -= done
        return request

    assert sglang_all_reduce.released(own, updater, "release", done=set()) == "release"
    assert sglang_all_reduce.taken_again(own, updater, "weights", done={"weights"}) == "weights"
    assert sglang_all_reduce.taken_again(own, updater, "cache", done={"kv_cache"}) == "cache"
    assert steps == ["release", "suspend", "suspend", "weights", "cache", "resume", "resume"]
    assert members[0].tricomm.comm is not None


def test_sglang_runs_calls_of_the_fused_hook_that_the_kernels_do_not_take():
    made = SglangAllReduce(_Group(), "tp")
    assert not made.disabled and torch.equal(made.custom_all_reduce(X), X * 2)
    assert made.custom_all_reduce(torch.ones(9)) is None
    assert made.fused_allreduce_rmsnorm(X, X, X[0], 0.5)[0].tolist() == (X * 0.5).tolist()
    wide = torch.ones(2, 9)
    for x, residual, weight in [(wide, wide, wide[0]), (X, X[:1], X[0]), (X, X.half(), X[0]), (X, X, X[0, :4])]:
        assert made.fused_allreduce_rmsnorm(x, residual, weight, 0.5) is None
    made.close()
    assert made.disabled


def test_the_fused_hook_calls_sglangs_function_for_other_groups():
    members = {True: SglangAllReduce(_Group(), "attention"), False: object()}
    hook = sglang_all_reduce.fused(
        lambda *, use_attn_tp_group: (2, 0, SimpleNamespace(ca_comm=members[use_attn_tp_group]))
    )
    own = []

    def original(*args, **options):
        own.append((len(args), options))
        return None, None

    norm, residual = hook(original, X, X, X[0], eps=0.5, max_token_num=4)
    assert torch.equal(norm, X * 0.5) and residual is X and own == []
    assert hook(original, X, X, X[0], use_attn_tp_group=False) == (None, None)  # another custom all-reduce
    assert hook(original, input_tensor=torch.ones(2, 9), residual=torch.ones(2, 9), weight=torch.ones(9)) == (
        None,
        None,
    )
    assert hook(original, X, X, X[0], 0.5, 4) == (None, None)  # arguments whose meaning may differ in another version
    assert [count for count, _ in own] == [3, 3, 5]


def test_the_layout_in_a_compiled_graph_is_that_of_the_result():
    x, weight = torch.ones(8, 2).t(), torch.ones(8)
    with FakeTensorMode() as mode:
        told = torch.ops.tricomm.sglang_all_reduce_rms_norm(*map(mode.from_tensor, (x, x, weight)), 1e-6, "tp")
    assert [one.stride() for one in told] == [(8, 1), (8, 1)], "results are contiguous, whatever the input"


def test_dispatch_is_unchanged_if_tricomm_cannot_run(caplog):
    hook = sglang_all_reduce.dispatched(lambda: Engine("SGLang", logging.getLogger("sglang")))
    with caplog.at_level(logging.WARNING):
        assert hook(lambda group, device: (group, device), group=(own := object()), device="cpu") == (own, "cpu")
    assert "torch.distributed did not make this group" in caplog.text


def test_changes_in_a_newer_sglang_are_named():
    def dispatch_custom_allreduce(group, device, tuning): ...

    def flashinfer_allreduce_residual_rmsnorm(input_tensor, residual, weight, eps=1e-6): ...

    def resolve_fusion_group(*, use_attn_tp_group): ...

    wrong = sglang_all_reduce.misfits({name: f for name, f in locals().items()})
    assert wrong[0] == "dispatch_custom_allreduce needs the parameter 'tuning'"
    assert "flashinfer_allreduce_residual_rmsnorm has no parameter 'use_attn_tp_group'" in wrong
    assert not any("resolve_fusion_group" in text for text in wrong)


def test_off_without_the_variable_and_with_another_version(monkeypatch, caplog):
    monkeypatch.delenv("SGLANG_TRICOMM", raising=False)
    monkeypatch.setitem(sys.modules, "sglang", None)  # an import would fail
    sglang_plugin.register()
    monkeypatch.setenv("SGLANG_TRICOMM", "maybe")
    with pytest.raises(InvalidArgument, match="SGLANG_TRICOMM"):
        sglang_plugin.register()
    monkeypatch.setenv("SGLANG_TRICOMM", "1")
    newer = ModuleType("sglang")
    newer.__version__ = "0.6.1"
    monkeypatch.setitem(sys.modules, "sglang", newer)
    with caplog.at_level(logging.WARNING):
        sglang_plugin.register()
    assert "SGLang 0.6.1 is outside the range that this version of tricomm was tested with, 0.5.23 to" in caplog.text


@pytest.mark.parametrize(
    ("version", "inside"), [("0.5.23", True), ("0.5.23.post1", True), ("0.5.22", False), ("0.5", False)]
)
def test_a_range_of_three_numbers(version, inside):
    assert (VersionRange((0, 5, 23), (0, 5, 23)).refusal("SGLang", version) is None) == inside
