"""Every collective over tricomm's own communicator: one row per collective.

All uneven exchanges and all even ones are one row: whether an exchange is even no rank knows alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tricomm.c10d.call import Call

TABLE: dict[str, Callable[[Any, Call], Any]] = {
    "all_reduce": lambda comm, call: comm.all_reduce(call.x, op=call.op),
    "all_gather": lambda comm, call: comm.all_gather(call.x, out=call.out),
    "reduce_scatter": lambda comm, call: comm.reduce_scatter(call.x, op=call.op, out=call.out),
    "broadcast": lambda comm, call: comm.broadcast(call.x, call.root),
    "reduce": lambda comm, call: comm.reduce(call.x, call.root, op=call.op),
    "gather": lambda comm, call: comm.gather(call.x, call.root, out=call.out),
    "scatter": lambda comm, call: comm.scatter(call.x, call.root, out=call.out),
    "all_to_all_v": lambda comm, call: comm.all_to_all_v(call.x, *(call.splits or ()), out=call.out),
    "barrier": lambda comm, call: comm.barrier(),
}
