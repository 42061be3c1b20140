"""The settings of a communicator. All but the timeouts must be the same on all ranks; the rendezvous compares them."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

from tricomm import env, gone
from tricomm.errors import InvalidArgument
from tricomm.kernels import layout
from tricomm.kernels.collectives.registry import WIRES
from tricomm.policy.launch_shapes import BESIDE_BLOCKS
from tricomm.topology.model import Topology

_LONGEST = 365 * 86400.0  # seconds; waits of the system overflow at some higher value


def _whole(name: str, value: object, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise InvalidArgument(f"{name}={value!r}: an integer from {least} to {most} is needed")


@dataclass(frozen=True)
class Tuning:
    """Settings that tests and the explorer force; `tuned` sets them.

    blocks       grid of every kernel; refused above the blocks that are surely resident. A message has at most one
                 block a queue
    tile         64-bit words per tile of every kernel; refused if a kernel cannot use it
    first_epoch  epoch of the first call: tests start near the limits
    """

    blocks: int | None = None
    tile: int | None = None
    first_epoch: int = 1


@dataclass(frozen=True)
class Options:
    """Settings of one communicator.

    timeout        seconds that a call may take before `CollectiveTimeout`; also the limit of the rendezvous
    stall_timeout  seconds without a heartbeat of a peer for which a call waits, before `PeerStalled`
    arena_bytes    memory per rank that peers can reach: headers and mailboxes; longer messages are sent in chunks
    max_blocks     upper limit of the grid of a kernel, also NCCL's; None: the number of blocks that are certainly
                   resident
    beside_compute whether calls overlap other kernels, such as a matrix product. They then use table rows for that,
                   compact kernels of 128 registers a thread (docs/tuning.md), and 16 blocks unless `max_blocks` is set
    dependent_launch  whether kernels on sm_90 and newer begin while the previous kernel on the stream ends
                   (docs/memory.md#concurrent-calls). TRICOMM_DEPENDENT_LAUNCH=0 on one rank turns it off on all
    topology       the links between the ranks' devices, by rank, or a file of them; None: read from the machine
    share_device   whether ranks may share a GPU, on which they take turns (for tests and debugging, not for speed)
    nccl           whether NCCL, on GPUs, runs calls that the kernels do not; if not, such calls and groups are refused
    compile_after_set_up  whether a call that can be prepared may compile its kernel; if not, it fails unless the kernel
                   is prebuilt or prepared (docs/tuning.md#compile-before-the-job). TRICOMM_COMPILE_AFTER_SET_UP=0 turns
                   it off for all groups
    batch_invariant  whether the bits of a reduction depend on rank order alone: not on size, place in the tensor,
                   algorithm, protocol, chunk, grid or graph. Calls that cannot guarantee this are refused.
                   TRICOMM_BATCH_INVARIANT=1 sets it for all groups of a process
                   (docs/torch-distributed.md#batch-invariance)
    wire           fp8, int8 or fp8_gather: quantise an all_reduce on the links, as `all_reduce(wire=)` does, from the
                   size at which a cost model expects it to be faster (1 MiB or more); None: only calls with `wire=`.
                   TRICOMM_WIRE sets it for all groups of a process

    Raises `InvalidArgument` for a value out of range, and for an option that is gone (`tricomm.gone`).
    """

    timeout: float = 600.0
    stall_timeout: float = 30.0
    arena_bytes: int = 64 * 1024 * 1024
    max_blocks: int | None = None
    beside_compute: bool = False
    dependent_launch: bool = True
    topology: Topology | None = None
    nccl: bool = True
    share_device: bool = False
    compile_after_set_up: bool = True
    batch_invariant: bool = False
    wire: str | None = None
    _tuning: Tuning = Tuning()

    def __new__(cls, *args: Any, **settings: Any) -> Self:
        gone.refuse(*(f"Options({name})" for name in settings))
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if isinstance(self.topology, str | Path):
            object.__setattr__(self, "topology", Topology.load(self.topology))
        if not isinstance(self.topology, Topology | None):
            raise InvalidArgument(f"Options.topology={self.topology!r}: a Topology, or a file of one, is needed")
        switches = (
            "nccl",
            "share_device",
            "batch_invariant",
            "beside_compute",
            "dependent_launch",
            "compile_after_set_up",
        )
        for name in switches:
            if not isinstance(getattr(self, name), bool):
                raise InvalidArgument(f"Options.{name}={getattr(self, name)!r}: True or False is needed")
        if self.wire is not None:
            check_wire(self.wire, "Options.wire")
            if self.batch_invariant:
                raise InvalidArgument(
                    f"Options.wire={self.wire!r} (TRICOMM_WIRE) in a batch-invariant group: a quantised sum depends on "
                    "the other elements of its block; choose one of the two"
                )
        for name in ("timeout", "stall_timeout"):
            object.__setattr__(self, name, seconds(getattr(self, name), f"Options.{name}"))
        _whole("Options.arena_bytes", self.arena_bytes, layout.MIN_ARENA, 1 << 40)
        if self.max_blocks is not None:
            _whole("Options.max_blocks", self.max_blocks, 1, layout.MAX_BLOCKS)
        elif self.beside_compute:
            object.__setattr__(self, "max_blocks", BESIDE_BLOCKS)


def check_wire(wire: object, name: str, off: str = "None") -> None:
    """Raises `InvalidArgument` for an unknown `wire`; `off` names the setting without quantisation."""
    if wire not in WIRES:
        raise InvalidArgument(f"{name}={wire!r}: {', '.join(WIRES)} or {off} is needed")


def digest_of(options: Options, arena: layout.Layout, device: str) -> int:
    """A number that differs if two ranks' memory or settings do not fit together."""
    return zlib.crc32(repr((arena.digest, device, replace(options, timeout=1.0, stall_timeout=1.0))).encode())


def tuned(options: Options, **forced: Any) -> Options:
    """`options` with these fields of `Tuning`."""
    return replace(options, _tuning=replace(options._tuning, **forced))


def with_environment(options: Options | None) -> Options:
    """`options`, by default `Options()`, with the environment's switches applied. Raises `InvalidArgument`."""
    options = options or Options()
    env.logs_routing()  # checked now, because a router reads it when it must not fail
    if not env.compile_after_set_up():
        options = replace(options, compile_after_set_up=False)
    wire = env.wire()
    if wire is not None and options.wire is None:
        check_wire(wire, "TRICOMM_WIRE", "no value")
        options = replace(options, wire=wire)
    return replace(options, batch_invariant=True) if env.batch_invariant() else options


def seconds(value: float | timedelta, name: str) -> float:
    """`value` in seconds; raises `InvalidArgument` unless it is a positive number or timedelta, of a year at most."""
    number = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number <= _LONGEST:
        raise InvalidArgument(
            f"{name}={value!r}: a positive number of seconds (or a timedelta) is needed, a year at most"
        )
    return float(number)
