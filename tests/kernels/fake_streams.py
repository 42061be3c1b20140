"""The streams, events and allocator's memory of torch.cuda, as `tests.fake_cuda.World` runs them without a GPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from tests.fake_cuda import World


class FakeStream:
    """`torch.cuda.Stream`. `queue` has what is pending on it: whether it can run yet, and what it does."""

    def __init__(self, world: World, device: int, handle: int) -> None:
        self.world, self.device, self.cuda_stream = world, torch.device("cuda", device), handle
        self.capture: list[Callable[[], None]] | None = None
        self.queue: deque[tuple[Callable[[], bool], Callable[[], Any]]] = deque()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FakeStream) and (self.device, self.cuda_stream) == (other.device, other.cuda_stream)

    def __hash__(self) -> int:
        return hash((self.device, self.cuda_stream))

    def wait_stream(self, other: FakeStream) -> None:
        self.world.log.append(f"{self} waits for {other}")
        self.after(other.mark())

    def query(self) -> bool:
        return not self.queue

    def mark(self) -> list[bool]:
        """A list that is not empty after all present work of the stream has run."""
        passed: list[bool] = []
        self.world.enqueue(self, lambda: passed.append(True))
        return passed

    def after(self, passed: list[bool]) -> None:
        self.world.enqueue(self, lambda: None, lambda: bool(passed))

    def __repr__(self) -> str:
        return f"stream {self.cuda_stream} of {self.device}"


class FakeEvent:
    """`torch.cuda.Event`."""

    world: World

    def __init__(self, enable_timing: bool = False) -> None:
        self.stream: FakeStream | None = None
        self.passed, self.captured = [True], False

    def record(self, stream: FakeStream | None = None) -> None:
        self.stream = stream or self.world.current_stream()
        self.captured = self.stream.capture is not None
        self.passed = self.stream.mark()
        self.world.log.append(f"event on {self.stream}")

    def wait(self, stream: FakeStream) -> None:
        self.world.log.append(f"{stream} waits for an event on {self.stream}")
        if self.captured and stream.capture is None:
            raise self.world.complain("a stream waited for an event of a capture outside of it")
        stream.after(self.passed)

    def query(self) -> bool:
        if any(s.capture is not None for s in self.world.streams.values()):
            raise self.world.complain("an event was queried while a graph was captured")
        if self.captured:
            raise self.world.complain("an event of a capture was queried")
        return bool(self.passed)

    def elapsed_time(self, other: FakeEvent) -> float:
        if self.captured or other.captured or not (self.passed and other.passed):
            raise self.world.complain("elapsed_time of an event that is captured, or has not passed")
        return 1.0


class Lease(np.ndarray):
    """Memory of tensors, freed with the last of them."""


@dataclass
class Block:
    """Memory of torch's allocator: of one stream, and used by `others` that `record_stream` was told of."""

    memory: np.ndarray
    stream: FakeStream
    others: set[FakeStream] = field(default_factory=set)
