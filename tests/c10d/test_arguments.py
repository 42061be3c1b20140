"""Bad input that one rank can see: the error names the argument and the remedy, nothing is sent, the group works."""

import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore, distributed_c10d

from tricomm import GroupAborted, InvalidArgument
from tricomm.c10d import group_calls, group_over
from tricomm.c10d.fallback_backends import Backends
from tricomm.c10d.process_group import TricommGroup

ones = torch.ones
GAPS = ones(4, 2).t()
SHARED = ones(1).expand(3)


def quantised():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch will drop them
        return torch.quantize_per_tensor(ones(3), 0.1, 0, torch.qint8)


@pytest.fixture
def group():
    made = group_over(HashStore(), 0, 1, timedelta(seconds=60))
    yield made
    x = ones(3)
    made.allreduce([x]).wait()  # the group still works after the refusal
    assert x.tolist() == [1.0] * 3
    made.shutdown()


REFUSED = {
    "outputs too many": (lambda g: g.allgather([[ones(3)] * 2], [ones(3)]), "list of 1 tensors.*one per rank; found 2"),
    "outputs too few": (lambda g: g.allgather([[]], [ones(3)]), "list of 1 tensors"),
    "gather list": (lambda g: g.gather([[ones(3)] * 2], [ones(3)]), "gather output list: a list of 1"),
    "gather sizes": (lambda g: g.gather([[ones(2)]], [ones(3)]), "output 0 has 2 elements, the input 3"),
    "scatter list": (lambda g: g.scatter([ones(3)], [[ones(3)] * 3]), "scatter input list: a list of 1"),
    "scatter sizes": (lambda g: g.scatter([ones(3)], [[ones(2)]]), "input 0 has 2 elements, the output 3"),
    "reduce_scatter list": (lambda g: g.reduce_scatter([ones(3)], [[ones(3)] * 2]), "input list: a list of 1"),
    "all_to_all list": (lambda g: g.alltoall([ones(1)], [ones(1)] * 2), "all_to_all input list: a list of 1"),
    "coalesced lists": (lambda g: g.allgather_coalesced([[ones(1)]], [ones(1)] * 2), "1 lists of 2 outputs"),
    **{
        f"{name}, shared output": (call, f"{name}: elements of the tensor share memory")
        for name, call in {
            "all_gather": lambda g: g.allgather([[SHARED]], [ones(3)]),
            "gather": lambda g: g.gather([[SHARED]], [ones(3)]),
            "scatter": lambda g: g.scatter([SHARED], [[ones(3)]]),
            "reduce_scatter": lambda g: g.reduce_scatter([SHARED], [[ones(3)]]),
            "all_to_all": lambda g: g.alltoall([SHARED], [ones(3)]),
        }.items()
    },
    "all_gather with gaps": (
        lambda g: g.all_gather_single(GAPS, ones(8)),
        "all_gather_into_tensor.*not contiguous.*copy",
    ),
    "reduce_scatter with gaps": (lambda g: g.reduce_scatter_single(GAPS, ones(8)), "reduce_scatter_tensor.*not contig"),
    "all_to_all with gaps": (
        lambda g: g.all_to_all_single(GAPS, ones(2, 4), [], []),
        "all_to_all_single.*not contiguous",
    ),
    "all_gather sizes": (
        lambda g: g.all_gather_single(ones(7), ones(8)),
        "output has 7 elements; 1 ranks with 8 each need 8",
    ),
    "splits": (
        lambda g: g.all_to_all_single(ones(4), ones(4), [4], [3]),
        "input: splits .3. do not fit 4 rows.*add up to the rows",
    ),
    "dtypes": (lambda g: g.all_gather_single(ones(4), ones(4).int()), "torch.int32 and torch.float32 are mixed"),
    "several tensors": (lambda g: g.allreduce([ones(1), ones(1)]), "2 tensors were given; one per rank"),
    "no tensor": (lambda g: g.broadcast([3]), "a torch.Tensor is needed, found int"),
    "root": (lambda g: g.reduce([ones(1)], 1), r"root rank 1 is not in 0..0"),
    "op": (lambda g: g.allreduce([ones(1)], "sum"), "ReduceOp is needed"),
    "op of floats": (lambda g: g.allreduce([ones(1)], dist.ReduceOp.BAND), "band needs an integer or bool tensor"),
    "op of complex": (lambda g: g.allreduce([ones(1) * 1j], dist.ReduceOp.MAX), "complex numbers have no order"),
    "scaled integers": (
        lambda g: g.allreduce([ones(1).int()], dist._make_nccl_premul_sum(2.0)),
        "PREMUL_SUM of torch.int32 is not defined; use a float",
    ),
    "a factor elsewhere": (
        lambda g: g.allreduce([ones(1)], dist._make_nccl_premul_sum(torch.ones(1, device="meta"))),
        "needs one real factor on the CPU",
    ),
    "a negated message": (lambda g: g.recv_anysource([ones(3)._neg_view()], 0), "no view with another sign"),
    "a negated output": (
        lambda g: g.all_gather_single(ones(3)._neg_view(), ones(3)),
        "not contiguous, or a negated view",
    ),
    "quantised": (lambda g: g.allreduce([quantised()]), "also has scales; pass x.dequantize"),
    "shared elements": (lambda g: g.allreduce([ones(1).expand(3)]), "share memory.*contiguous"),
    "peer": (lambda g: g.send([ones(1)], 4, 0), r"rank 4 is not in 0..0"),
    "no peer": (lambda g: g.send([ones(1)], None), "send: rank None is no integer"),
    "tag": (lambda g: g.recv_anysource([ones(1)], ones(1)), "recv: tag tensor.* is no integer"),
    "itself": (lambda g: g.recv([ones(1)], 0, 0), "this rank itself; copy"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(group, what):
    call, words = REFUSED[what]
    with pytest.raises(InvalidArgument, match=words):
        call(group)


def test_tensors_of_a_device_that_the_group_does_not_serve(group):
    other = dist.ProcessGroupGloo(HashStore(), 0, 1, timedelta(seconds=60))
    cuda_only = TricommGroup(group._config, group._dispatcher._agreed, Backends({"cuda": other}))
    for call in (
        lambda: cuda_only.allreduce([ones(3)]),
        lambda: cuda_only.all_gather_single(ones(3), ones(3)),
        lambda: cuda_only.broadcast([ones(3)], 0),
    ):
        with pytest.raises(InvalidArgument, match="on cpu was given; this group serves cuda: move the tensor.*for cpu"):
            call()
    cuda_only._dispatcher.close()


def test_devices_are_not_mixed():
    with pytest.raises(InvalidArgument, match="tensors on cpu and meta are mixed; move them to one device"):
        group_calls.all_gather_single(torch.ones(2, device="meta"), ones(2), 1)


def test_the_object_that_torch_has_for_the_cpu_runs_nothing(group):
    """Torch before 2.14 has none; 2.15's hooks ask it what it can do, and C++ could ask it for a collective."""
    x = torch.full((2,), 7.0)
    with pytest.raises(RuntimeError, match="device type cpu|tricomm does not support allreduce"):
        dist.ProcessGroup._get_backend(group, torch.device("cpu")).allreduce([x])
    assert x.tolist() == [7.0, 7.0]


def test_torch_aborts_a_group_that_has_no_backend_for_a_gpu():
    """torch looks for one first, and takes a RuntimeError as the answer that there is none."""
    dist.init_process_group("tricomm", store=HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    distributed_c10d._abort_process_group()
    assert not dist.is_initialized()
    with pytest.raises(GroupAborted, match="destroyed"):
        group.allreduce([ones(1)])


def test_the_method_that_would_end_the_process_in_c_is_refused(group):
    with pytest.raises(InvalidArgument, match=r"split_group: call dist.new_group\(ranks\)"):
        group.split_group([0])


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_torch_itself_refuses_split_group():
    dist.init_process_group("tricomm", store=HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match="device|not support splitting"):
            dist.split_group(split_ranks=[[0]])
        x = ones(2)
        dist.all_reduce(x, group=dist.new_group([0]))
        assert x.tolist() == [1.0, 1.0]
    finally:
        dist.destroy_process_group()
