"""An all-reduce of torch.distributed that is quantised on the links, because its group's options or a variable ask."""

import hashlib
import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tricomm
from tests import ranks
from tests.c10d.bodies.groups import default_group, refused
from tests.policy.test_wire import bits, numbers
from tricomm.c10d import capabilities
from tricomm.kernels import reference
from tricomm.kernels.collectives import registry
from tricomm.options import Options
from tricomm.policy import selection

LONG = (1 << 19) + 77  # elements of bf16: just over 1 MiB


def parts_of_two() -> list[torch.Tensor]:
    return [numbers(r, LONG, torch.bfloat16) for r in range(2)]


def digest(x: torch.Tensor) -> str:
    return hashlib.sha256(bits(x).numpy().tobytes()).hexdigest()


def options_of(wire: str | None, how: str) -> Options:
    """The options of a c10d group that asks for `wire` by them, or by the variable."""
    if how == "variable" and wire is not None:
        os.environ["TRICOMM_WIRE"] = wire
    return Options(arena_bytes=256 << 10, wire=wire if how == "options" else None)


def all_reduced(rank: int, world_size: int, tell: object, url: str, wire: str, how: str) -> list[str]:
    x = numbers(rank, LONG, torch.bfloat16)
    with default_group(rank, world_size, url, "kernels", options=options_of(wire, how)):
        os.environ.pop("TRICOMM_WIRE", None)  # which is read when a group is made
        first = x.clone()
        dist.all_reduce(first)
        mean = x.clone()
        dist.all_reduce(mean, dist.ReduceOp.AVG, async_op=True).wait()
        other = torch.full((LONG,), rank + 1, dtype=torch.int16)
        dist.all_reduce(other)
        short = torch.full((300,), 17.0 + 431 * rank)
        dist.all_reduce(short)
        assert torch.equal(other, torch.full_like(other, 3)) and torch.equal(short, torch.full_like(short, 465))
    return [digest(first), digest(mean)]


@pytest.mark.parametrize("wire, how", [("fp8", "options"), ("int8", "variable")])
def test_a_c10d_group_has_the_bits_of_direct_calls(wire, how, url):
    x = parts_of_two()

    def direct(comm):
        return [digest(comm.all_reduce(x[comm.rank].clone(), op, wire=wire)) for op in ("sum", "avg")]

    wanted = tricomm.simulate(direct, 2)
    assert wanted[0] == [digest(reference.quantised(wire, op, x)) for op in ("sum", "avg")]
    assert ranks.run(2, all_reduced, url, wire, how, timeout=200) == wanted


def differing(rank: int, world_size: int, tell: object, url: str, wires: list[str | None], how: str) -> str:
    ranks.together(url, rank, range(world_size))
    options = options_of(wires[rank], how)

    def group():
        with default_group(rank, world_size, url, "kernels", options=options):
            pass

    return refused(group, "TRICOMM_WIRE, or Options.wire of pg_options", kind=tricomm.RendezvousError)


@pytest.mark.parametrize("how", ["options", "variable"])
def test_c10d_ranks_that_differ_in_it_are_named(how, url):
    told = ranks.run(3, differing, url, [None, "int8", None], how)
    assert all("rank(s) [0, 2] ask for wire=None, rank(s) [1] ask for wire='int8'" in text for text in told)


def not_compared(rank: int, world_size: int, tell: object, url: str) -> bool:
    options, x = options_of(("fp8", "int8")[rank], "options"), numbers(rank, LONG, torch.bfloat16)
    capabilities._common_wire = lambda said: options.wire
    with default_group(rank, world_size, url, "kernels", options=options):
        dist.all_reduce(x)
    return digest(x) in (digest(reference.quantised(w, "sum", parts_of_two())) for w in ("fp8", "int8"))


def test_without_the_comparison_such_a_c10d_group_goes_over_tcp_and_nobody_knows(url):
    assert ranks.run(2, not_compared, url) == [False, False]


def without_e4m3(rank: int, world_size: int, tell: object, url: str, wire: str) -> str:
    """On GPUs of sm_80, as torch names them."""
    torch.cuda.is_available = lambda: True
    torch.cuda.current_device = torch.cuda.device_count = lambda: 1
    torch.cuda.get_device_capability = lambda device: (8, 0)
    dist.is_nccl_available = lambda: False  # torch's builds for CUDA have it, and look for real GPUs
    capabilities.pick_device = torch.device

    def group():
        with default_group(rank, world_size, url, "kernels", options=options_of(wire, "options")):
            pass

    if wire != "int8":
        return refused(group, f"Options.wire='{wire}'", kind=(tricomm.InvalidArgument, tricomm.RendezvousError))
    group()
    return ""


@pytest.mark.parametrize("wire", ["fp8", "fp8_gather", "int8"])
def test_an_architecture_without_e4m3_is_named_when_a_c10d_group_is_made(wire, url):
    told = ranks.run(2, without_e4m3, url, wire)
    assert (
        all("sm_80 has no e4m3 conversions: use sm_89 or newer, or wire=int8" in text for text in told)
        or wire == "int8"
    )


def gathered(rank: int, world_size: int, tell: object, url: str) -> str:
    selection.why_not_multicast = lambda device, reason: "there is none"  # with NVLS it would not gain
    x = numbers(rank, 2 * LONG, torch.bfloat16)
    with default_group(rank, world_size, url, "kernels", options=options_of("fp8_gather", "options")):
        dist.all_reduce(x)
    return digest(x)


def test_fp8_gather_through_c10d(url):
    x = [numbers(r, 2 * LONG, torch.bfloat16) for r in range(2)]
    assert ranks.run(2, gathered, url, timeout=200) == [digest(reference.quantised("fp8_gather", "sum", x))] * 2


# DDP


def gradient(rank: int, step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.outer(torch.arange(1.0, 8) * (rank + step), torch.arange(300.0) + rank).to(dtype)


def step_of(wrapped: nn.Module, rank: int, step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The gradient of a layer's weight after one step whose own gradient is `gradient`."""
    (weight,) = wrapped.parameters()
    weight.grad = None
    x, scale = (torch.arange(300.0) + rank).to(dtype), (torch.arange(1.0, 8) * (rank + step)).to(dtype)
    (wrapped(x) * scale).sum().backward()
    return weight.grad


def of_ddp(state: object, dtype: torch.dtype = torch.float32) -> DistributedDataParallel:
    wrapped = DistributedDataParallel(nn.Linear(300, 7, bias=False, dtype=dtype))
    wrapped.register_comm_hook(state, tricomm.ddp_hook)
    return wrapped


def trained(rank: int, world_size: int, tell: object, url: str, wire: str) -> list[str]:
    with default_group(rank, world_size, url, "kernels", options=options_of(None, "options")):
        wrapped = of_ddp((None, wire))
        found = [digest(step_of(wrapped, rank, step).flatten()) for step in range(3)]
        plain = digest(step_of(of_ddp(None), rank, 3).flatten())  # the same shape, unquantised
        return [*found, digest(step_of(wrapped, rank, 3).flatten()), plain]


@pytest.mark.parametrize("wire", registry.WIRES)
def test_ddp_with_a_wire_has_the_documented_mean_on_every_rank(wire, url):
    wanted = []
    for step in (0, 1, 2, 3):
        parts = [gradient(r, step).flatten() for r in range(2)]
        wanted.append(digest(reference.quantised(wire, "avg", parts)))
    exact = digest((parts[0] + parts[1]) / 2)
    assert ranks.run(2, trained, url, wire, timeout=200) == [[*wanted, exact]] * 2 and exact != wanted[-1]


def not_quantised(rank: int, world_size: int, tell: object, url: str, route: str, wires: list, kind: str) -> str:
    dtype = getattr(torch, kind)
    with default_group(rank, world_size, url, route, options=options_of(None, "options")):
        wrapped = of_ddp((None, wires[rank]), dtype)
        text = refused(lambda: step_of(wrapped, rank, 1, dtype), "", kind=Exception)
        y = torch.ones(5)
        if "CollectiveMismatch" not in text:
            dist.all_reduce(y)
            assert torch.equal(y, torch.full((5,), 2.0))
        return text


@pytest.mark.parametrize(
    "route, wires, kind, message",
    [
        ("gloo", ["fp8", "fp8"], "float32", "TCP unless TRICOMM_CPU=kernels"),
        ("kernels", ["fp8", "fp8"], "float64", "wire='fp8' quantises sums and averages of fp16, bf16 and fp32, not"),
        ("kernels", ["e5m2", "e5m2"], "float32", "ddp_hook: wire='e5m2': fp8, int8, fp8_gather"),
        ("kernels", ["fp8", "int8"], "float32", "wire=int8"),
        ("kernels", ["fp8", None], "float32", "wire=fp8"),
    ],
    ids=str,
)
def test_a_bucket_that_cannot_be_quantised_is_refused_by_name(route, wires, kind, message, url):
    told = ranks.run(2, not_quantised, url, route, wires, kind, timeout=200)
    assert all(message in text for text in told), told


def in_a_callback(rank: int, world_size: int, tell: object, url: str) -> str:
    with default_group(rank, world_size, url, "kernels", options=options_of(None, "options")) as world:
        bucket = SimpleNamespace(buffer=lambda: torch.ones(300))
        first = dist.all_reduce(torch.zeros(1), async_op=True).get_future()
        chain = first.then(lambda f: tricomm.ddp_hook((world, "fp8"), bucket).wait())
        return refused(chain.wait, "in a callback of a future", kind=Exception)


def test_a_callback_whose_calls_no_kernel_runs_does_not_quantise(url):
    assert all("wire='fp8'" in text for text in ranks.run(2, in_a_callback, url))
