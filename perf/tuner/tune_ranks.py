"""The processes of `tricomm tune`: start the ranks, or be one of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch
from torch.distributed.distributed_c10d import PrefixStore, Store

import tricomm
from tricomm import ResourceError, typed_json
from tricomm.perf import units
from tricomm.perf.bench import timing
from tricomm.perf.bench.measure import pick_device
from tricomm.perf.tuner.coordinator import Coordinator
from tricomm.perf.tuner.points import TuningRequest
from tricomm.perf.tuner.worker import TuningWorker
from tricomm.perf.workers import run_workers
from tricomm.policy import user_tables
from tricomm.store.rendezvous import open_store

OnMessage = Callable[[str, dict[str, Any]], None]
_RENDEZVOUS = 60.0  # seconds for the rendezvous of all ranks


def run(request: TuningRequest, world_size: int, on_message: OnMessage) -> None:
    """Tune with `world_size` ranks of this node, started here; all have ended at the end. Raises `RankFailed`."""
    silence = 2 * request.timeout + _RENDEZVOUS
    settings = asdict(_begun(request))
    for rank, message in run_workers("tricomm.perf.tuner.tune_ranks:main", world_size, settings, silence):
        if rank == 0:
            on_message(message.pop("event"), message)


def join(request: TuningRequest, on_message: OnMessage) -> None:
    """Be one rank of a group that torchrun has started. Raises `InvalidArgument` if its variables are not set."""
    store, rank, world_size = open_store("env://", None, None, _RENDEZVOUS)
    _tune(lambda event, **message: on_message(event, message), rank, world_size, store, _begun(request))


def _begun(request: TuningRequest) -> TuningRequest:
    """The request with the end of its budget, which starts now and includes the start of the ranks."""
    return replace(request, end=time.monotonic() + request.budget)


def device_of(request: TuningRequest, rank: int) -> torch.device:
    """The device of a rank. Raises `ResourceError` if times would be simulated without a request for that, or for a
    mode that a CPU does not have."""
    device = pick_device(request.device, rank)
    if device.type == "cpu" and not request.simulated:
        raise ResourceError(
            "these ranks run on a CPU, whose times are simulated and say nothing about a GPU; --simulated makes a "
            "table of them that no GPU ever uses"
        )
    for mode in request.modes:
        timing.check_mode(mode, device.type == "cpu")
    return device


def plan(request: TuningRequest, world_size: int) -> list[str]:
    """The decisions, the time and the effect of a run, in words. Raises as `device_of`."""
    asked = request.points(device_of(request, 0).type == "cpu")
    least, most = (units.text(edge(point.nbytes for point in asked)) for edge in (min, max))
    names = list(dict.fromkeys(point.collective for point in asked))
    calls = ", ".join(names) if len(names) < 4 else f"{len(names)} collectives"
    sizes = least if least == most else f"{least} to {most}"
    return [
        f"{len(asked)} decision{'s' * (len(asked) > 1)} for {world_size} ranks: {calls}, {sizes}",
        f"at most {request.budget:g} s, with the start of the ranks; an interrupt keeps what was measured",
        f"better choices go into a table in {user_tables.folder()}; tricomm tune undo takes them back",
    ]


def main(emit: Callable[..., None], rank: int, world_size: int, url: str, settings: Any) -> None:
    """One rank in its process (see `tricomm.perf.workers`)."""
    store, rank, world_size = open_store(url, rank, world_size, _RENDEZVOUS)
    _tune(emit, rank, world_size, store, typed_json.convert(settings, TuningRequest))


def _tune(emit: Callable[..., None], rank: int, world_size: int, store: Store, request: TuningRequest) -> None:
    """Be one rank of a tuning run; rank 0 emits what `Coordinator` does.

    Raises as `device_of`, and `ResourceError` if nothing can be written; `RankLost` or the group's own error if a rank
    ended.
    """
    device = device_of(request, rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(1)

    def open_group(number: int) -> tricomm.Communicator:
        options = tricomm.Options(timeout=request.timeout, beside_compute=request.beside, wire=request.wire or None)
        prefixed = PrefixStore(f"tricomm-tune-{number}", store)
        return tricomm.Communicator(prefixed, rank, world_size, device, options=options, meeting_timeout=_RENDEZVOUS)

    worker = TuningWorker(store, rank, world_size, open_group, 2 * request.timeout + _RENDEZVOUS)
    try:
        if rank:
            worker.serve()
        else:
            Coordinator(emit, worker, request).run()
    finally:
        worker.close()
