"""Explores every order of the events of CPU calls in c10d groups, for small programs. No order may match different
calls.

A rank has a program and callbacks. These are lists of statements, which make calls, attach callbacks to futures, wait,
collect futures and destroy groups. When a future completes, each of its callbacks gets a thread; a callback that is
attached later runs in the thread that attaches it. A call is queued in its line. It begins when the earlier calls of
the line have ended. It ends on a rank some time after all members of its group have begun it. Each of these is an
event.

Calls of the same name on several ranks belong together. The modelled ranks do not see names: they match calls by
identities, which follow from the rules in `docs/torch-distributed.md` ("Order of calls"). The verdict is WRONG if ranks
match calls of different names. It is MISMATCH if a call is refused, or if no event is possible before the end and two
ranks gave one call different identities, or a rank has ended without it; any other stop before the end is a DEADLOCK.
Each rule is also removed, and then the model must find a fault. Change a rule here first, then in `c10d`.

Run: python -m devtools.call_order_model (seconds; exits with 1 if a verdict is not the expected one).
"""

from __future__ import annotations

from devtools.call_order_model.events import Case
from devtools.call_order_model.scenarios import kept, limits, taken_away


def cases() -> list[Case]:
    return [*kept(), *taken_away(), *limits()]
