"""An all-reduce of torch.distributed that is quantised on the links, because its group's options or a variable ask."""

import hashlib
import os

import pytest
import torch
import torch.distributed as dist

import tricomm
from tests import ranks
from tests.c10d.bodies.groups import default_group, refused
from tests.policy.test_wire import bits, numbers
from tricomm.c10d import capabilities
from tricomm.kernels import reference
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
