"""A queue from rank 0 to rank 1 with credits.

Modelled on message passing examples and on the FIFOs of MSCCL++ and NCCL: the producer may be DEPTH messages ahead of
the slots that the consumer has freed.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from tests.explorer.public.common import INT, Mistake, numbers, races
from tricomm import Communicator


@triton.jit
def queue(
    x_ptr, out_ptr, slots, heads, tails, rank, messages, DEPTH: tl.constexpr, SIZE: tl.constexpr, BUG: tl.constexpr
):
    """Rank 0 writes into rank 1's slots and its head; rank 1 writes rank 0's tail."""
    lane = tl.arange(0, SIZE)
    if rank == 0:
        for i in range(messages):
            ahead = DEPTH + 1 if BUG == "one credit too many" else DEPTH
            if BUG != "no credits":
                while tl.atomic_add(tails[0], 0, sem="acquire", scope="sys") + ahead <= i:  # @ credit
                    pass
            tl.debug_barrier()
            if BUG == "head before the data":
                tl.atomic_xchg(heads[1], i + 1, sem="release", scope="sys")
            slot = slots[1] + i % DEPTH * SIZE
            tl.store(slot + lane, tl.load(x_ptr + i * SIZE + lane))  # @ produce
            if BUG != "no barrier before the head":
                tl.debug_barrier()
            if BUG == "head in the wrong memory":
                tl.atomic_xchg(heads[0], i + 1, sem="release", scope="sys")
            elif BUG == "plain head":
                tl.store(heads[1], i + 1)  # @ plain head
            elif BUG == "relaxed head":
                tl.atomic_xchg(heads[1], i + 1, sem="relaxed", scope="sys")
            elif BUG != "head before the data":
                tl.atomic_xchg(heads[1], i + 1, sem="release", scope="sys")  # @ head
        while tl.atomic_add(tails[0], 0, sem="acquire", scope="sys") < messages:  # @ all freed
            pass
    if rank == 1:
        for i in range(messages):
            if BUG == "looks only once":
                tl.atomic_add(heads[1], 0, sem="acquire", scope="sys")
            elif BUG == "plain poll":
                while tl.load(heads[1], volatile=True) <= i:  # @ head plain poll
                    pass
            else:
                while tl.atomic_add(heads[1], 0, sem="acquire", scope="sys") <= i:  # @ head waited
                    pass
            tl.debug_barrier()
            if BUG == "credit before the read":
                tl.atomic_add(tails[0], 1, sem="release", scope="sys")
            got = tl.load(slots[1] + i % DEPTH * SIZE + lane)  # @ consume
            tl.store(out_ptr + i * SIZE + lane, got)
            if BUG != "no barrier before the credit":
                tl.debug_barrier()
            if BUG == "relaxed credit":
                tl.atomic_add(tails[0], 1, sem="relaxed", scope="sys")
            elif BUG == "gpu credit":
                tl.atomic_add(tails[0], 1, sem="release", scope="gpu")  # @ gpu credit
            elif BUG != "credit before the read":
                tl.atomic_add(tails[0], 1, sem="release", scope="sys")  # @ give credit


def queues(bug: str = "", messages: int = 5, depth: int = 2) -> Callable[[Communicator], Any]:
    def fn(comm: Communicator) -> torch.Tensor:
        slots, heads, tails = comm.symmetric((depth, 4), INT), comm.symmetric((1,), INT), comm.symmetric((1,), INT)
        x, out = numbers(0, 0, messages * 4), torch.zeros(messages * 4, dtype=INT)
        comm.launch(
            queue, 1, x, out, slots.peers, heads.peers, tails.peers, comm.rank, messages, DEPTH=depth, SIZE=4, BUG=bug
        )
        assert comm.rank != 1 or torch.equal(out, x)
        return out

    return fn


MISTAKES = (
    *races(
        "produce, consume",
        "relaxed head; plain poll; head before the data; no barrier before the head; relaxed credit; "
        "credit before the read; no barrier before the credit; one credit too many; no credits",
    ),
    Mistake("plain head", 2, "race", pairs=("plain head, head waited",)),
    Mistake("head in the wrong memory", 2, "deadlock", lone=("credit", "head waited")),
    Mistake("looks only once", 2, "race uninitialised", pairs=("produce, consume",), lone=("consume",)),
    Mistake("gpu credit", 2, "scope", pairs=("gpu credit, credit",)),
)
