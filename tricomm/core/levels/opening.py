"""Opens the two levels of a group: by all ranks together, and on all of them or on none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from torch.distributed.distributed_c10d import PrefixStore, Store

from tricomm.core.faults import Faults
from tricomm.core.group import Group
from tricomm.core.launcher import Launcher
from tricomm.core.levels.across import Across, GlooAcross, KernelsAcross, NcclAcross
from tricomm.core.levels.bridge import Bridge, Side
from tricomm.core.levels.two_level import Inside, TwoLevel
from tricomm.core.monitor import Monitor
from tricomm.core.watcher import WATCHER
from tricomm.errors import ResourceError, TricommError
from tricomm.metrics.counters import KERNELS, NCCL
from tricomm.options import Options
from tricomm.policy.levels import NODES, Parts
from tricomm.store.node_reports import NodeReports
from tricomm.store.store_control import open_store_control

_GRACE_SECONDS = 2.0

# A communicator of some ranks: their store, this rank's number, how many they are, and their options.
Make = Callable[[Store, int, int, Options], Inside]


@dataclass(frozen=True)
class Whole:
    """The whole group's collaborators, and its store."""

    group: Group
    faults: Faults
    monitor: Monitor
    launcher: Launcher
    store: Store


def open_levels(undo: ExitStack, whole: Whole, parts: Parts, backend: str, make: Make, limit: float) -> TwoLevel | str:
    """The two levels of a group of several `parts`, with `backend` across, or why there are none: the same on all
    ranks, which call it together. `undo` gives all of it back. `limit` bounds each step, in seconds.

    Raises `ResourceError` if there are none and no kernel or other backend could run a call, and as
    `ControlPage.exchange` does if a rank does not come.
    """
    group = whole.group
    part, position = parts.of[group.rank], parts.position(group.rank)
    with ExitStack() as steps:
        sharing: list[Inside] = []
        across: Across | None = None
        try:
            with _jointly(group, f"memory inside each of the {parts.between}", limit):
                store = PrefixStore(f"tricomm-part-{group.name}-{part}", whole.store)
                sharing.append(make(store, position, parts.size, _options(group, parts.members(part))))
                steps.callback(sharing[0].close)
            with _jointly(group, f"{backend} between the {parts.between}", limit):
                store = PrefixStore(f"tricomm-column-{group.name}-{position}", whole.store)
                across = _open_across(group, store, parts, backend, make, limit, sharing)
                steps.callback(across.close, True, limit)
        except _NotPossible as error:
            if group.routes.no_kernels is not None and group.routes.fallback is None:
                raise ResourceError(
                    f"no kernel can run: {group.routes.no_kernels}; nor in two levels: {error}"
                ) from error
            return str(error)
        assert across is not None, "both have been made, or one step was refused"
        inside = sharing[0]
        reports = None
        if parts.between == NODES:
            reports = NodeReports(whole.store, group.rank, group.world_size, group.control.nonce, limit)
        sides = Side(group.control, whole.monitor), Side(inside.control, inside.monitor)
        bridge = Bridge(*sides, parts, across, reports, group.options.stall_timeout)
        levels = TwoLevel(parts, whole.faults, whole.monitor, sharing, across, bridge)
        steps.callback(levels.close)
        if reports is not None:  # between islands all ranks see each other's pages
            whole.launcher.mirror(levels.announce, levels.withdraw)
            whole.monitor.unseen = bridge.unseen
        whole.monitor.watch(levels)
        WATCHER.add(bridge)
        undo.push(steps.pop_all())
        return levels


class _NotPossible(Exception):
    """A step has failed on some rank; raised on all."""


@contextmanager
def _jointly(group: Group, what: str, limit: float) -> Iterator[None]:
    """Around a step of all ranks together: if it fails on one, all raise `_NotPossible` that names it."""
    error: TricommError | None = None
    try:
        yield
    except TricommError as failure:
        error = failure
    try:
        group.control.agree(error, what, limit + _GRACE_SECONDS)
    except TricommError as joint:
        raise _NotPossible(str(joint)) from error


def _open_across(
    group: Group, store: Store, parts: Parts, backend: str, make: Make, limit: float, sharing: list[Inside]
) -> Across:
    """The backend across; if it has shared memory, its group is appended to `sharing`."""
    part = parts.of[group.rank]
    if backend == KERNELS:
        column = make(store, part, parts.count, _options(group, parts.column(group.rank)))
        sharing.append(column)
        return KernelsAcross(column.collectives, column.close, column.abort)
    if backend == NCCL:
        control, _ = open_store_control(store, part, parts.count, limit, 0)
        try:
            return NcclAcross(control, group.device, limit, group.options.max_blocks)
        except BaseException:
            control.close()
            raise
    return GlooAcross(store, part, parts.count, group.timeout, limit)


def _options(group: Group, members: Sequence[int]) -> Options:
    """The options of a communicator of some of the ranks."""
    topology = group.topology.of(members) if group.topology is not None else None
    return replace(group.options, nccl=False, two_level=False, topology=topology, channels=1)
