"""Which kernels of a group are dependent launches (`kernels/device/dependent_launch.py`), the same on all ranks.

A kernel that begins early occupies SMs while the previous one still runs. Calls of other groups and streams rely on a
group's kernels having at most `Options.max_blocks` resident blocks. So a kernel is a dependent launch if it has at most
half of these blocks, as in short calls: two such kernels stay within the limit, and a third begins only after the first
has ended, because a kernel signals after its own wait (`devtools/mailbox_model/residency.py`).
"""

from __future__ import annotations

from tricomm import env
from tricomm.core.topology_agreement import DeviceFacts
from tricomm.options import Options
from tricomm.policy.selection_facts import SelectionFacts
from tricomm.store.control import ControlPage

_REASONS = (
    "",
    "Options(dependent_launch=False)",
    "TRICOMM_DEPENDENT_LAUNCH=0",
    "it needs a GPU of sm_90 or newer, and a driver of CUDA 12.3 or newer",
)
_ASKED, _VARIABLE, _DEVICE = range(1, len(_REASONS))


def agree(control: ControlPage, options: Options, facts: DeviceFacts, timeout: float) -> str:
    """The reason why no kernel of the group is a dependent launch; empty if some are. Called by all ranks together."""
    mine = _ASKED if not options.dependent_launch else _VARIABLE if not env.dependent_launch() else 0
    mine = mine or (0 if facts.dependent_launch else _DEVICE)
    answers = control.exchange(bytes([mine]), "dependent launches", timeout)
    said = ((rank, answer[0]) for rank, answer in enumerate(answers) if answer[0])
    return next((f"{_REASONS[why]} (rank {rank})" for rank, why in said), "")


def refusal(facts: SelectionFacts, blocks: int) -> str:
    """The reason why a kernel of `blocks` blocks is no dependent launch; empty if it is one."""
    if facts.no_dependent_launch or 2 * blocks <= facts.max_blocks:
        return facts.no_dependent_launch
    return f"{blocks} blocks are over half of the {facts.max_blocks} that this group may have"
