"""Ranks in two levels that give their memory back and take it again."""

from __future__ import annotations

import os
import time

import torch

import tricomm
from tests.core.bodies.suspension_bodies import refuse_once, refused, refused_within, resident
from tests.core.levels.level_bodies import SMALL, joined, one_call


def _joined(rank, world_size, url, file):
    """Islands if a topology file is given, else nodes."""
    if file is None:
        return joined(rank, world_size, url)
    given = tricomm.Options(timeout=30.0, arena_bytes=SMALL, topology=file)
    return tricomm.init(url, rank, world_size, "cpu", options=given)


def _right(comm, number):
    """What is wrong with both forms."""
    results = [
        one_call(comm, 500 + number, torch.float32, "sum", number, protocol=form) for form in ("shards", "leaders")
    ]
    return [wrong for wrong in results if wrong]


def round_trip(rank, world_size, tell, url, file, victim):
    """Suspended and resumed, at first with memory that one rank is refused: what is wrong, how many pages the levels'
    memory has before and meanwhile, and what was said."""
    with _joined(rank, world_size, url, file) as comm:
        wrong = _right(comm, 1)
        levels = comm._planner.levels
        arenas = [each.group.arena for each in levels.sharing]
        bases = [arena.bases for arena in arenas]
        before = [resident(*_own(arena, each.group.rank)) for arena, each in zip(arenas, levels.sharing, strict=True)]
        comm.suspend()
        asleep = [resident(*_own(arena, each.group.rank)) for arena, each in zip(arenas, levels.sharing, strict=True)]
        said = [refused(lambda: comm.all_reduce(torch.ones(9))), refused(comm.suspend)]
        if rank == victim:
            refuse_once("take_again")
        said.append(refused(comm.resume))
        if comm.suspended:
            comm.resume()
        wrong += [] if [arena.bases for arena in arenas] == bases else ["addresses"]
        wrong += _right(comm, 2)
    return wrong, before, asleep, said


def _own(arena, rank):
    return arena.bases[rank], arena.nbytes


def one_dies(rank, world_size, tell, url, victim):
    """The victim is killed while all sleep; what the others are told without a call, and when."""
    with joined(rank, world_size, url) as comm:
        comm.all_reduce(torch.ones(10))
        comm.suspend()
        tell(os.getpid())
        if rank == victim:
            time.sleep(60)
        text = refused_within(comm.check, 20.0)
        return text, time.monotonic(), refused(comm.resume)
