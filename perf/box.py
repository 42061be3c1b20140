"""The facts about a machine on which selection depends; the history keeps them with each run."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from functools import lru_cache

from tricomm import Communicator, typed_json
from tricomm.errors import TricommError
from tricomm.kernels import layout
from tricomm.metrics.counters import NCCL
from tricomm.policy.backend_choice import GroupFacts
from tricomm.policy.selection_facts import SelectionFacts
from tricomm.policy.tuning_tables import Fingerprint, TunedTable


@dataclass(frozen=True)
class Box:
    """The facts that selection uses for a group with default options, except the tuning table."""

    fingerprint: Fingerprint
    arena_bytes: int
    most_blocks: int
    no_multicast: str
    routes: GroupFacts

    @property
    def simulated(self) -> bool:
        return self.fingerprint.device == "cpu"

    def site(self, tuned: TunedTable | None) -> SelectionFacts:
        """The facts for selection with the table `tuned`. Raises `InvalidArgument` for an arena that is too small."""
        links, ranks = self.fingerprint, self.fingerprint.world_size
        return SelectionFacts(
            links.device,
            ranks,
            layout.plan(ranks, self.arena_bytes),
            self.most_blocks,
            topology=links.topology,
            reachable=self.routes.reachable,
            tuned=tuned.rows if tuned is not None else (),
            tuned_name=tuned.name if tuned is not None else "",
            batch_invariant=self.routes.batch_invariant,
            no_multicast=self.no_multicast,
        )


def dumps(comm: Communicator) -> str:
    """The facts of the box that `comm` runs on, as JSON."""
    routes = comm._internal.planner.router.facts
    if comm.gpu is not None:  # because a benchmark's group is made without NCCL
        routes = replace(routes, fallback=NCCL, missing="")
    facts = Box(
        comm._internal.group.fingerprint,
        comm.options.arena_bytes,
        comm._internal.group.max_blocks,
        comm._internal.planner.site.no_multicast,
        routes,
    )
    return json.dumps(asdict(facts))


@lru_cache(maxsize=256)
def loads(text: str) -> Box | None:
    """The facts in JSON `text`; None if there are none, or if their values are impossible."""
    try:
        box = typed_json.decode(text, Box)
        possible = 1 <= box.most_blocks <= layout.MAX_BLOCKS and box.fingerprint.world_size == box.routes.world_size
        device = box.fingerprint.device.removeprefix("sm_")
        return box if possible and (device.isdecimal() or device in ("cpu", "cuda")) and box.site(None) else None
    except (TricommError, ValueError):
        return None
