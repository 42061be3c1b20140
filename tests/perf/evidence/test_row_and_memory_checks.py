"""The kit's fused calls, users' tensors and suspended memory are checked, and what is wrong with them is seen."""

from __future__ import annotations

import pickle

import torch

import tricomm
from tests import ranks
from tricomm.core.fused.fused_call import FUSED
from tricomm.kernels import layout
from tricomm.kernels.collectives import registry
from tricomm.perf import row_calls
from tricomm.perf.bench import collective_calls, fused_bench
from tricomm.perf.evidence import checks, compiling, hardware, memory_checks, row_checks
from tricomm.perf.evidence.stage import EvidenceSettings
from tricomm.policy.selection_facts import SelectionFacts


def test_fused_calls_are_checked_and_a_wrong_bit_in_any_output_is_seen(monkeypatch):
    monkeypatch.setattr(row_checks, "kernels", lambda world_size: [registry.find(FUSED, "two_shot", "ll")])
    few = [call for call in row_checks.calls(True) if call[0].quantize in ("", "nvfp4") and call[1] == "bfloat16"]
    monkeypatch.setattr(row_checks, "calls", lambda dry_run: few[1:3])
    ours, spoilt = fused_bench.ours, {}

    def made(comm, case, tensors):
        run, name = ours(comm, case, tensors), spoilt.get(comm.rank)

        def spoiling():
            run()
            out = getattr(tensors.call, name) if name else None
            if out is not None:
                out.view(torch.uint8).view(-1)[:1] ^= 1

        return spoiling

    monkeypatch.setattr(fused_bench, "ours", made)

    def body(comm):
        told = {"": row_checks.sweep(comm, True)}
        for name in ("residual_out", "norm_out", "quant_out", "scale_out"):
            spoilt[comm.rank] = name
            told[name] = row_checks.sweep(comm, True)
        return told

    for told in tricomm.simulate(body, 2, options=checks.FEW_OPTIONS):
        assert told.pop("") == (2, [])
        for name, (_, errors) in told.items():
            assert errors and all("elements are wrong" in e or f"unfused steps: {name}" in e for e in errors)
            assert any(e.endswith(f"other bits than the unfused steps: {name}") for e in errors), name


def test_every_fused_call_of_the_kit_has_its_variant_and_none_twice(monkeypatch):
    monkeypatch.setattr(hardware, "capability", lambda settings: 90)
    settings = EvidenceSettings(None, slice_us=1.0)
    jobs = row_checks.jobs(4, settings)
    made = [compiling._of_row(pickle.loads(pickle.dumps(job))[1], 90) for job in jobs]
    known = {repr((one.function.__name__, one.constexprs, one.bits)) for one in made}
    assert len(known) == len(jobs)
    site = SelectionFacts("sm_90", 4, layout.plan(4, checks.OPTIONS.arena_bytes), layout.MAX_BLOCKS)
    for kernel in row_checks.kernels(4):
        for form, dtype, rows in row_checks.calls(False):
            one = row_calls.launched(site, kernel, form, getattr(torch, dtype), rows, mode="eager")
            assert repr((one.function.__name__, one.constexprs, one.bits)) in known


def test_a_fused_variant_is_compiled_by_its_name_and_an_error_is_told(monkeypatch):
    kernel = registry.find(FUSED, "one_shot", "ll")
    (job,) = compiling.of_rows([kernel], 2, 1 << 20, 90, [(row_calls.RowForm(160, "fp8"), "bfloat16", 1)])
    assert compiling.compile_one(job) == ""
    assert compiling._name(job) == "all_reduce_rms_norm_one_shot_ll bfloat16 fp8@160 of 2 ranks"
    broken = (job[0], job[1] | {"FORM": "fp8@161"}, *job[2:])
    assert "InvalidArgument: fp8@161: fused kernels take rows" in compiling.compile_one(broken)


def test_what_suspend_loses_is_seen():
    def body(comm):
        right = memory_checks.suspend_and_resume(comm)
        real = comm.resume

        def forgetful():
            real()
            comm.all_reduce = lambda x, **how: x

        comm.resume = forgetful
        return right, memory_checks.suspend_and_resume(comm)

    for right, (calls, errors) in tricomm.simulate(body, 2, options=checks.FEW_OPTIONS):
        assert right == (8, []) and calls == 8
        assert any("a handle after 1 suspensions" in text for text in errors)
        assert not any("after 0 suspensions" in text for text in errors)


def a_rank_with_its_own_tensor(rank, world_size, tell, url):
    with tricomm.init(url, rank, world_size, "cpu", options=checks.FEW_OPTIONS) as comm:
        right = memory_checks.registered(comm)
        real = comm.all_gather
        comm.all_gather = lambda handle: real(handle).neg_()
        return right, memory_checks.registered(comm)


def test_registered_tensors_are_checked_and_what_is_wrong_is_seen(url):
    for right, (_, errors) in ranks.run(2, a_rank_with_its_own_tensor, url):
        assert right == (2, []) and len(errors) == 1 and "all_gather of a registered tensor" in errors[0]


def test_kernels_through_the_switch_are_checked_where_there_is_one_and_what_is_wrong_is_seen(monkeypatch):
    right, spoilt = collective_calls.call, set()

    def made(comm, *call):
        result = right(comm, *call)
        if comm.rank in spoilt:
            result.view(torch.uint8)[:1] ^= 1
        return result

    monkeypatch.setattr(collective_calls, "call", made)

    def body(comm):
        good = memory_checks.through_the_switch(comm, True)
        spoilt.add(comm.rank)
        bad = memory_checks.through_the_switch(comm, True)
        comm._user_kernels._group.arena.multicast = 0
        return good, bad, memory_checks.through_the_switch(comm, True)

    for (calls, errors), (_, bad), without in tricomm.simulate(body, 2, options=checks.FEW_OPTIONS):
        assert calls == len(bad) and not errors and without == (0, [])
        assert {text.partition(":")[0] for text in bad} == {
            k.name for k in (*registry.MULTICAST, *registry.MULTICAST_ZERO_COPY)
        }
