"""All ranks in one process on one GPU, with a stream each: for tests and for debugging of kernels, not for speed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta

import torch
from torch._C._distributed_c10d import HashStore

from tricomm import env
from tricomm.communicator import Communicator
from tricomm.core.bootstrap import pick_device
from tricomm.core.group import Runtime
from tricomm.errors import InvalidArgument
from tricomm.kernels import layout
from tricomm.options import Options, digest_of, seconds
from tricomm.policy import launch_shapes
from tricomm.store.arenas.local_arena import LocalArena, LocalGroup
from tricomm.store.control import ControlPage
from tricomm.store.handshake import handshake

_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_MOST_QUEUES = 32  # the most hardware queues that CUDA maps streams to
_QUEUES_A_STREAM = 4  # torch creates streams for four priorities in turn, and a program uses streams of one priority


_ONE_PROCESS = Runtime("ranks of one process share all memory already; pass tensors themselves")


def local(
    world_size: int,
    device: torch.device | str | int | None = None,
    timeout: float | timedelta | None = None,
    options: Options | None = None,
) -> list[Communicator]:
    """One communicator per rank, all in this process on one GPU. `comm.stream` is the rank's stream.

    Use each rank under `torch.cuda.stream(comm.stream)`, and let no stream wait for another rank's stream, because
    their kernels run at the same time and wait for each other. The driver must give each stream a separate hardware
    queue and must load no kernel while others run, so CUDA_DEVICE_MAX_CONNECTIONS=32 and CUDA_MODULE_LOADING=EAGER are
    set here, unless they are set or torch has started CUDA already.

    Raises `InvalidArgument` on a CPU, where a call returns only when all ranks have made it, and if CUDA has started
    with too few connections; `ResourceError` if memory is refused, and then nothing is left.
    """
    options = options or Options()
    limit = options.timeout if timeout is None else seconds(timeout, "timeout")
    _check_queues(world_size)
    gpu = pick_device(device)
    if gpu.type != "cuda":
        raise InvalidArgument(
            "local: on a CPU a call returns only when all ranks have made it, so ranks of one process take turns: use "
            "tricomm.simulate(fn, world_size)"
        )
    plan = layout.plan(world_size, options.arena_bytes)
    launch_shapes.check_device(gpu.type, plan, options._tuning.tile)
    agreed = digest_of(options, plan, gpu.type)
    store = HashStore()

    def meeting(rank: int) -> ControlPage:
        return handshake(store, rank, world_size, limit, agreed)

    def joining(rank: int) -> Communicator:
        comm = Communicator._over(controls[rank], arenas[rank], plan, gpu, limit, options, _ONE_PROCESS)
        undo.callback(comm.close)
        return comm

    with ExitStack() as undo, ThreadPoolExecutor(world_size) as ranks:
        controls = list(ranks.map(meeting, range(world_size)))
        for control in controls:
            undo.callback(control.close)
        pages = [control.host_words for control in controls]
        arenas: list[LocalArena] = LocalGroup(world_size, gpu, pages=pages).open(plan.nbytes)
        for arena in arenas:
            undo.callback(arena.close)
        comms = list(ranks.map(joining, range(world_size)))
        for comm, arena in zip(comms, arenas, strict=True):
            comm.stream = arena.stream
        undo.pop_all()
    return comms


def _check_queues(world_size: int) -> None:
    """Raises `InvalidArgument` if there are too few hardware queues: ranks whose streams share a queue would deadlock,
    because it starts a kernel only after the previous one has ended. The driver reads the variable once, when it is
    initialised."""
    if not torch.cuda.is_initialized():
        env.default(_CONNECTIONS, str(_MOST_QUEUES))
        env.default("CUDA_MODULE_LOADING", "EAGER")
    connections = env.hardware_queues()
    needed = min(_QUEUES_A_STREAM * world_size, _MOST_QUEUES)
    if world_size > 1 and connections < needed:
        raise InvalidArgument(
            f"local: {world_size} ranks on streams of one GPU need {needed} hardware queues, and CUDA has started with "
            f"{connections}: set {_CONNECTIONS}={_MOST_QUEUES} and CUDA_MODULE_LOADING=EAGER before CUDA starts"
        )
