"""The checks of fused calls, users' tensors, suspended and multicast memory without a GPU: they find errors."""

import torch

import tricomm
from tests import ranks
from tests.gpu.exact import checks, memory_checks, row_checks
from tricomm.core.fused.fused_call import FUSED
from tricomm.kernels.collectives import registry
from tricomm.perf.bench import collective_calls, fused_bench


def test_fused_calls_are_checked_and_a_wrong_bit_in_any_output_is_seen(monkeypatch):
    kernel = registry.find(FUSED, "two_shot", "ll")
    few = [call for call in row_checks.calls(True) if call[0].quantize in ("", "nvfp4") and call[1] == "bfloat16"]
    monkeypatch.setattr(row_checks, "calls", lambda few_calls: few[1:3])
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
        told = {"": row_checks.sweep(comm, kernel, True)}
        for name in ("residual_out", "norm_out", "quant_out", "scale_out"):
            spoilt[comm.rank] = name
            told[name] = row_checks.sweep(comm, kernel, True)
        return told

    for told in tricomm.simulate(body, 2, options=checks.FEW_OPTIONS):
        assert told.pop("") == []
        for name, errors in told.items():
            assert errors and all("elements are wrong" in e or f"unfused steps: {name}" in e for e in errors)
            assert any(e.endswith(f"other bits than the unfused steps: {name}") for e in errors), name


def a_rank_with_its_own_tensor(rank, world_size, tell, url):
    with tricomm.init(url, rank, world_size, "cpu", options=checks.FEW_OPTIONS) as comm:
        right = memory_checks.registered(comm)
        real = comm.all_gather
        comm.all_gather = lambda handle: real(handle).neg_()
        return right, memory_checks.registered(comm)


def test_registered_tensors_are_checked_and_errors_are_found(url):
    for right, errors in ranks.run(2, a_rank_with_its_own_tensor, url):
        assert right == [] and len(errors) == 1 and "all_gather of a registered tensor" in errors[0]


def test_multicast_kernels_are_checked_where_there_is_multicast_memory_and_errors_are_seen(monkeypatch):
    right, spoilt = collective_calls.call, set()

    def made(comm, *call):
        result = right(comm, *call)
        if comm.rank in spoilt:
            result.view(torch.uint8)[:1] ^= 1
        return result

    monkeypatch.setattr(collective_calls, "call", made)

    def body(comm):
        good = memory_checks.multicast(comm, True)
        spoilt.add(comm.rank)
        bad = memory_checks.multicast(comm, True)
        comm._internal.group.arena.multicast = 0
        return good, bad, memory_checks.multicast(comm, True)

    for errors, bad, without in tricomm.simulate(body, 2, options=checks.FEW_OPTIONS):
        assert errors == [] and without is None
        assert {text.partition(":")[0] for text in bad} == {
            k.name for k in (*registry.MULTICAST, *registry.MULTICAST_ZERO_COPY)
        }
