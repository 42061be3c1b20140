"""Runs functions of one rank at once, so that their calls in different channels run side by side."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tricomm import threads
from tricomm.errors import InvalidArgument

Functions = Sequence[Callable[[], Any]]
_LOOK_SECONDS = 0.05  # in which a Ctrl-C is seen


def on_streams(gpu: Any, functions: Functions) -> list[Any]:
    """Call each on a stream of its own of `gpu` (a `Gpu`), after the work already on the current stream, and order the
    current stream after all of them; returns their results. A function returns when it has launched its kernels.

    Raises `InvalidArgument` during a capture: parallel branches of a graph have no order that all ranks share.
    """
    if gpu.capturing():
        raise InvalidArgument(
            "side_by_side: the current stream captures a CUDA graph, whose parallel branches may run one after "
            "another, in another order on each rank: capture one channel a graph, or the calls one after another"
        )
    here, results = gpu.stream(), []
    streams = [torch.cuda.Stream(gpu.device) for _ in functions]
    try:
        for function, stream in zip(functions, streams, strict=True):
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                results.append(function())
    finally:
        for stream in streams:
            here.wait_stream(stream)
    for result in tree_leaves(results):
        if isinstance(result, torch.Tensor) and result.device == gpu.device:
            result.record_stream(here)  # its memory belongs to the other stream, which torch also hands out elsewhere
    return results


def in_threads(functions: Functions) -> list[Any]:
    """Call each in a thread of its own and wait for all of them; returns their results, or raises the first one's
    error. Gradients and inference mode are as in this thread. Raises `ResourceError`, before any is called, if a thread
    cannot start."""
    outcomes: list[tuple[Any, BaseException | None]] = [(None, None)] * len(functions)
    inference, gradients = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    go, started = threading.Event(), list[threading.Thread]()

    def run(number: int) -> None:
        go.wait()
        if len(started) < len(functions):
            return
        try:
            with torch.inference_mode(inference), torch.set_grad_enabled(gradients):
                outcomes[number] = functions[number](), None
        except BaseException as error:
            outcomes[number] = None, error

    try:
        for number in range(len(functions)):
            started.append(threads.start(f"tricomm-side-{number}", run, number))
    finally:
        go.set()
    for thread in started:
        while thread.is_alive():
            thread.join(_LOOK_SECONDS)
    for _, error in outcomes:
        if error is not None:
            raise error
    return [result for result, _ in outcomes]
