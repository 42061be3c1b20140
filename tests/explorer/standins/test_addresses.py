"""A kernel may get a tensor by its address, as an integer or in a table of addresses."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import triton
import triton.language as tl

import tricomm
from tricomm.explorer.standins.host import ProgramHost


@triton.jit
def send(source, table, peer, SIZE: tl.constexpr):
    """From an address to the address that a table has, and to a peer."""
    at = tl.arange(0, SIZE)
    values = tl.load(source.to(tl.pointer_type(tl.int32)) + at)
    tl.store(tl.load(table).to(tl.pointer_type(tl.int32)) + at, values)
    tl.store(peer.to(tl.pointer_type(tl.int32)) + at, values)


def program(past=0):
    rank = dist.get_rank()
    memory = symm_mem.empty(32, dtype=torch.int32, device="cuda")
    handle = symm_mem.rendezvous(memory, dist.group.WORLD)
    x, out = torch.arange(32, dtype=torch.int32, device="cuda") + 100 * rank, torch.zeros(32, dtype=torch.int32)
    out = out.cuda()
    table = torch.tensor([out[:].data_ptr()], device="cuda")  # of a view that is gone at once
    send[(1,)](x.data_ptr() + past, table, handle.buffer_ptrs[1 - rank], SIZE=32)
    dist.barrier()
    return memory.clone(), out


@pytest.mark.parametrize("world_size", [2])
def test_memory_that_is_known_by_its_address_is_read_and_written(world_size):
    for rank, (memory, out) in enumerate(tricomm.simulate(program, world_size, compiled="sm_90")):
        assert torch.equal(memory, torch.arange(32, dtype=torch.int32) + 100 * (1 - rank))
        assert torch.equal(out, torch.arange(32, dtype=torch.int32) + 100 * rank)
    assert tricomm.check(program, world_size, 4, compiled="sm_90").ok


def test_an_address_past_the_tensor_is_out_of_bounds():
    report = tricomm.check(lambda: program(past=4), 2, 2, compiled="sm_90")
    assert [finding.kind for finding in report.findings[:1]] == ["out_of_bounds"], report


def test_the_address_of_a_tensor_on_the_cpu_is_no_address_on_the_gpu():
    def body():
        memory = symm_mem.empty(32, dtype=torch.int32, device="cuda")
        x = torch.zeros(32, dtype=torch.int32)
        send[(1,)](x.data_ptr(), torch.tensor([memory.data_ptr()], device="cuda"), memory.data_ptr(), SIZE=32)

    report = tricomm.check(body, 2, 2, compiled="sm_90")
    assert [finding.kind for finding in report.findings[:1]] == ["out_of_bounds"], report


def test_without_the_addresses_that_a_program_asked_for_its_memory_is_out_of_bounds(monkeypatch):
    class Forgetful(dict):
        def __setitem__(self, address, tensor):
            pass

    monkeypatch.setattr(ProgramHost, "addressed", property(lambda host: Forgetful(), lambda host, value: None), False)
    report = tricomm.check(program, 2, 2, compiled="sm_90")
    assert [finding.kind for finding in report.findings[:1]] == ["out_of_bounds"], report
