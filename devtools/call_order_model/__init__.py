"""Explores every order of events that the calls of c10d groups on the CPU allow: none may combine different calls.

A rank has a program and callbacks: lists of statements, which make calls, attach callbacks to futures, wait, collect
futures and destroy groups. It starts a thread for each callback of a future that completes; one that is attached later
runs in the thread that attaches it. A call is queued in its line, begins after those before it, and is done on a rank
some time after all members of its group have begun it. Each of these is an event, and all orders are explored.

The program pairs calls of one name. The model may not use these names: ranks match by the identities that the rules
of `docs/c10d.md` give ("Order of calls"). If an exchange joins calls of different names, it is WRONG. If nothing can
move before the end, it is a MISMATCH (two ranks gave one call different identities, or one has ended without it), else
a DEADLOCK. Each rule is also taken away, and then the model must fail. A rule changes here first, then in `c10d`.

Run: python -m devtools.call_order_model (seconds; exits with 1 if a verdict is not the expected one).
"""

from __future__ import annotations

from devtools.call_order_model.events import Case
from devtools.call_order_model.scenarios import kept, limits, taken_away


def cases() -> list[Case]:
    return [*kept(), *taken_away(), *limits()]
