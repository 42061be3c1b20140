"""Arguments that no kernel supports are refused by name, before anything is sent."""

from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

import tricomm
from tricomm import arguments
from tricomm.core import launch_plan
from tricomm.core.fused.fused_call import Epilogue, UserEpilogue
from tricomm.errors import InvalidArgument
from tricomm.options import Options, Tuning, seconds
from tricomm.policy.selection import Choice

CPU = torch.device("cpu")


@pytest.mark.parametrize(("op", "name"), [("SUM", "sum"), (dist.ReduceOp.PRODUCT, "prod"), (dist.ReduceOp.AVG, "avg")])
def test_operations_by_name_and_by_reduce_op(op, name):
    assert arguments.operation(op) == name


@pytest.mark.parametrize("op", ["median", None, 3, dist.ReduceOp.PREMUL_SUM])
def test_an_unknown_operation_is_refused_with_the_list(op):
    with pytest.raises(InvalidArgument, match="sum, avg, min, max, prod"):
        arguments.operation(op)


@pytest.mark.parametrize(
    ("x", "words"),
    [
        ([1.0], "a torch.Tensor is needed, found list"),
        (torch.eye(3).to_sparse(), "to_dense"),
        (torch.ones(3, requires_grad=True), "detach"),
        (torch.ones(3, dtype=torch.complex64).conj(), "resolve_conj"),
        (torch.empty(3, device="meta"), "meta tensor has no data"),
    ],
    ids=["list", "sparse", "grad", "conj", "meta"],
)
def test_tensors_that_no_kernel_takes(x, words):
    with pytest.raises(InvalidArgument, match=words):
        arguments.check_tensor(x, CPU, "all_reduce")


def test_tensors_without_ordinary_memory_are_refused():
    with FakeTensorMode():
        fake = torch.ones(3)
    with pytest.raises(InvalidArgument, match="FakeTensor wraps"):
        arguments.check_tensor(fake, CPU, "all_reduce")
    freed = torch.ones(100)
    freed.untyped_storage().resize_(0)
    with pytest.raises(InvalidArgument, match="freed or shrunk"):
        arguments.check_tensor(freed, CPU, "all_reduce")
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    with pytest.raises(InvalidArgument, match="NestedTensor wraps"):
        arguments.check_tensor(jagged, CPU, "all_reduce")
    with pytest.raises(InvalidArgument, match="transformed"):
        torch.func.vmap(lambda x: (arguments.check_tensor(x, CPU, "all_reduce"), x)[1])(torch.ones(2, 3))
    arguments.check_tensor(torch.nn.Parameter(torch.ones(3), requires_grad=False), CPU, "all_reduce")


def test_a_tensor_of_another_device_is_refused_with_both():
    with pytest.raises(InvalidArgument, match="on cpu, this communicator is on cuda:0"):
        arguments.check_tensor(torch.ones(2), torch.device("cuda:0"), "all_reduce")


def test_requires_grad_is_accepted_if_nothing_is_recorded():
    with torch.no_grad():
        arguments.check_tensor(torch.ones(3, requires_grad=True), CPU, "all_reduce")


def test_outputs_are_checked_for_shape_dtype_and_overlap():
    x = torch.ones(10)
    with pytest.raises(InvalidArgument, match=r"shape \(9,\), expected \(10,\)"):
        arguments.check_output(torch.ones(9), (10,), x, "all_reduce")
    with pytest.raises(InvalidArgument, match="dtype torch.float64"):
        arguments.check_output(torch.ones(10, dtype=torch.float64), (10,), x, "all_reduce")
    with pytest.raises(InvalidArgument, match="not contiguous"):
        arguments.check_output(torch.ones(20)[::2], (10,), x, "all_reduce")
    room = torch.ones(12)
    with pytest.raises(InvalidArgument, match="overlaps"):
        arguments.check_apart(room[:10], room[2:], "all_reduce", 0)
    arguments.check_apart(room, room, "all_reduce", 0)
    with pytest.raises(InvalidArgument, match="pass separate memory$"):
        arguments.check_apart(room, room, "all_to_all", None)
    arguments.check_apart(room[4:8], room, "all_gather", row=1)
    for row in (0, 2):
        with pytest.raises(InvalidArgument, match="overlaps"):
            arguments.check_apart(room[4:8], room, "all_gather", row)


def test_an_expanded_tensor_cannot_be_written_in_place():
    with pytest.raises(InvalidArgument, match="share memory"):
        arguments.check_writable(torch.ones(1).expand(5), "all_reduce")
    with pytest.raises(InvalidArgument, match="share memory"):
        arguments.check_writable(torch.ones(5).as_strided((3, 3), (1, 1)), "all_reduce")
    arguments.check_writable(torch.ones(4, 5).t(), "all_reduce")
    arguments.check_writable(torch.ones(4, 6)[:, ::2], "all_reduce")
    arguments.check_writable(torch.ones(1, 1).expand(1, 1), "all_reduce")


def test_fingerprints_differ_in_every_fact():
    choice = Choice("all_gather", "one_shot", "ll", 1, 4, 64, "why", "table", 0)
    request = launch_plan.Request("all_gather", elements=8)
    facts = {"choice": choice, "op": "sum", "dtype": "float32", "request": request, "mode": "eager"}
    changes = {"collective": "all_to_all", "algorithm": "two_shot", "protocol": "simple", "blocks": 2, "block": 128}
    others = [("choice", replace(choice, **{name: other})) for name, other in changes.items()]
    changes = {"elements": 9, "root": 0, "handle": SimpleNamespace(number=1)}
    others += [("request", request._replace(**{name: other})) for name, other in changes.items()]
    epilogue = Epilogue(8, torch.float32, 1e-6)
    changes = {
        "hidden": 4,
        "weight": torch.float16,
        "eps": 1e-5,
        "weight_bias": 1.0,
        "residual": False,
        "norm": False,
        "quantize": "fp8",
        "scale_layout": "linear",
    }
    others += [("request", request._replace(epilogue=epilogue))]
    others += [("request", request._replace(epilogue=epilogue._replace(**{n: v}))) for n, v in changes.items()]
    others += [("op", "max"), ("dtype", "int32"), ("mode", "graph")]
    seen = {launch_plan.announced(**facts)[0]} | {
        launch_plan.announced(**{**facts, name: other})[0] for name, other in others
    }
    assert len(seen) == len(others) + 1


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"timeout": 0}, "timeout=0"),
        ({"stall_timeout": float("nan")}, "stall_timeout=nan"),
        ({"timeout": 1e300}, r"Options.timeout=1e\+300: .*a year at most"),
        ({"stall_timeout": timedelta.max}, "Options.stall_timeout=datetime.timedelta"),
        ({"timeout": timedelta(seconds=-1)}, "Options.timeout=datetime.timedelta"),
        ({"arena_bytes": 100}, "from 65536"),
        ({"arena_bytes": 1e8}, "an integer"),
        ({"max_blocks": True}, "an integer"),
        ({"max_blocks": 65}, "from 1 to 64"),
    ],
)
def test_options_out_of_range(bad, words):
    with pytest.raises(InvalidArgument, match=words):
        Options(**bad)


@pytest.mark.parametrize("value", [0, -1, float("inf"), "5", True, None, 1e300, timedelta.max])
def test_a_timeout_is_a_positive_number_of_seconds(value):
    with pytest.raises(InvalidArgument, match="positive number of seconds"):
        seconds(value, "timeout")


def test_the_facts_of_an_epilogue_have_no_address_in_them():
    """So they are equal in every process, also for a function that Triton interprets."""
    function = SimpleNamespace(fn=test_the_facts_of_an_epilogue_have_no_address_in_them)
    facts = UserEpilogue(8, function, function, ("*i16",)).facts
    assert repr(facts) == repr((8, *[f"{__name__}:{function.fn.__name__}"] * 2, ("*i16",)))


def test_invalid_forced_shapes_are_refused_on_all_ranks_and_the_group_still_works():
    refused = []

    def body(comm):
        x = torch.arange(3.0) + comm.rank
        with pytest.raises(InvalidArgument, match="tile=512: tiles of 1 to 256 words .* all_reduce two_shot/ll"):
            comm.all_reduce(x.clone(), algorithm="two_shot", protocol="ll")
        refused.append(comm.rank)
        return comm.all_reduce(x, algorithm="one_shot", protocol="ll")

    results = tricomm.simulate(
        body, 2, options=Options(arena_bytes=128 << 10, max_blocks=2, _tuning=Tuning(tile=512, blocks=2))
    )
    assert sorted(refused) == [0, 1] and all(torch.equal(y, torch.tensor([1.0, 3.0, 5.0])) for y in results)
    with pytest.raises(InvalidArgument, match=r"blocks=3: at most 2 .* Options.max_blocks\); force 1 to 2"):
        tricomm.simulate(body, 2, options=Options(max_blocks=2, _tuning=Tuning(blocks=3)))


@pytest.mark.parametrize("timeout", ["soon", -1, True, float("nan")])
def test_a_wait_for_no_number_of_seconds_is_refused_and_the_group_still_works(timeout):
    def waits(comm):
        works = [comm.all_reduce(torch.ones(1), async_op=True)]
        works += [comm.recv(torch.empty(1), async_op=True)] if comm.rank == 0 else []
        for wait in (*(work.wait for work in works), comm.synchronize):
            with pytest.raises(InvalidArgument, match=f"timeout={timeout!r}: a positive number of seconds"):
                wait(timeout)
        if comm.rank == 1:
            comm.send(torch.ones(1), 0)
        return [work.wait(30) for work in works][-1], comm.all_reduce(torch.ones(1)).item()

    (source, total), (_, same) = tricomm.simulate(waits, world_size=2)
    assert (source, total, same) == (1, 2.0, 2.0)
