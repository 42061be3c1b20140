"""Explores every order of events that the mailbox protocol allows: none may lose a word or read a wrong one.

A slot is (owner, parity, source, word) and holds the epoch that was last written to it. A block is a list of
operations, a launch a list of blocks that run concurrently, a rank a list of launches in stream order; only dependent
launches overlap (`dependent_launches.py`). A `write` overwrites its slots (a push: a peer's; a stage: an own one;
clearing: own ones, with 0). A `poll` completes only when all its slots hold exactly its epoch. A `read` is a plain load
after a barrier and does not wait: another epoch in the slot is a wrong word. A poll for a word that was overwritten
never completes, so a lost word is a state in which no rank can move.

Each rule of the kernels is also dropped, and then the model must fail. A protocol changes here first, then in the
kernels. Memory is sequentially consistent here; the explorer checks the order of accesses. Whether kernels that overlap
have room on a GPU (`residency.py`), how survivors agree on a smaller group (`shrink.py`) and how a new rank learns that
(`replace.py`) are separate models.
Run: python -m devtools.mailbox_model (seconds; exits with 1 if a verdict is not the expected one).
"""

from __future__ import annotations

from devtools.mailbox_model import dependent_launches, epochs, late_stores, messages, plain_data, words_with_flags
from devtools.mailbox_model.explore import Case


def cases() -> list[Case]:
    some = [*words_with_flags.cases(), *epochs.cases(), *messages.cases()]
    return [*some, *plain_data.cases(), *dependent_launches.cases(), *late_stores.cases()]
