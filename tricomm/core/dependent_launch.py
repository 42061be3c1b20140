"""Whether a group's kernels are dependent launches (`kernels/device/dependent_launch.py`), the same on all ranks.

One group of a GPU at most. A kernel that begins early takes room on the GPU while it waits for the one before it, which
is resident. Ranks may begin calls of two groups in different orders: then the one before may wait for a peer that first
completes a call of the other group, which needs room here. So the GPU needs room for one more kernel than it has groups
(docs/memory.md); if all groups had dependent launches, for twice as many.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, Protocol

from tricomm import env
from tricomm.core.topology_agreement import DeviceFacts
from tricomm.options import Options
from tricomm.policy.backend_choice import GroupFacts
from tricomm.store.control import ControlPage

REASONS = (
    "",
    "Options(dependent_launch=False)",
    "TRICOMM_DEPENDENT_LAUNCH=0",
    "it needs a GPU of sm_90 or newer, and a driver of CUDA 12.3 or newer",
    "another communicator of the GPU has it",
    "ranks share a GPU",
)
_ASKED, _VARIABLE, _DEVICE, _TAKEN, _SHARED = range(1, len(REASONS))
_claiming = threading.Lock()


class Claimant(Protocol):
    """A `core.group.Group`, as far as it is looked at. `gpu.dependent` has the group of each device."""

    gpu: Any
    routes: GroupFacts
    options: Options
    control: ControlPage
    closed: bool


def agree(group: Claimant, facts: DeviceFacts, timeout: float) -> str:
    """Why the kernels of `group` are no dependent launches; empty if they are. Called by all ranks together. If it
    raises, the group holds no claim to its GPU."""
    if group.gpu is None:
        return "kernels are interpreted"
    if group.routes.no_kernels is not None:  # the same on all ranks
        return "NCCL serves every call"
    try:
        mine = facts.uuid.encode()[:36].ljust(36) + bytes([_refused(group, facts)])
        answers = group.control.exchange(mine, "dependent launches", timeout)
    except BaseException:  # whoever keeps the error keeps the group
        _release(group, facts)
        raise
    shared = len({answer[:-1] for answer in answers}) < len(answers)
    why = _SHARED if shared else next((answer[-1] for answer in answers if answer[-1]), 0)
    if why:
        _release(group, facts)
        ranks = [rank for rank, answer in enumerate(answers) if answer[-1] == why]
        return REASONS[why] + (f" (rank {ranks[0]})" if ranks else "")
    return ""


def _refused(group: Claimant, facts: DeviceFacts) -> int:
    if not group.options.dependent_launch:
        return _ASKED
    if not env.dependent_launch():
        return _VARIABLE
    if not facts.dependent_launch:
        return _DEVICE
    return 0 if _claimed(group, facts) else _TAKEN


def _claimed(group: Claimant, facts: DeviceFacts) -> bool:
    with _claiming:
        held = group.gpu.dependent.get(facts.uuid)
        other = None if held is None else held()
        if other is not None and not other.closed:
            return False
        group.gpu.dependent[facts.uuid] = weakref.ref(group)
        return True


def _release(group: Claimant, facts: DeviceFacts) -> None:
    with _claiming:
        held = group.gpu.dependent.get(facts.uuid)
        if held is not None and held() is group:
            del group.gpu.dependent[facts.uuid]
