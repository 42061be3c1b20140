"""Reports a deadlock: the tasks that wait, and the memory that each of them polls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tricomm.explorer.memory_model.regions import Memory
from tricomm.explorer.memory_model.source_lines import NOWHERE, Site
from tricomm.explorer.report.findings import Finding
from tricomm.explorer.schedule.tasks import Poll, State, Task


def deadlock(
    blocks: Sequence[Task], hosts: Sequence[Task], memory: Memory, left: Mapping[int, Site], why: str
) -> Finding:
    """A finding with every waiting task (rank, block, address, expected value and actual value), and with the ranks
    that have `left`, by the lines that closed the communicator.

    Warps of one block that wait for the same word, or at the same barrier, are one waiter.
    """
    waiting = [task for task in blocks if task.state in (State.PARKED, State.STOPPED) and task.started]
    waiters = _together([(task, *_block(task, memory)) for task in waiting])
    waiters += _together([(t, *_not_started(t)) for t in blocks if not t.started and t.state is State.READY])
    busy = {task.rank for task in waiting}
    waiters += [_host(h, h.rank in busy) for h in hosts if h.state is State.WAITING and not _waits_for_launch(h, busy)]
    waiters += _together([(task, *_running(task)) for task in blocks if task.started and task.state is State.READY])
    for host in [h for h in hosts if h.rank in left]:
        site = left[host.rank]
        waiters.append(_entry(host, site, f"rank {host.rank} has closed the communicator at {site.where}"))
    over = [str(h.rank) for h in hosts if h.state is State.DONE and h.rank not in left]
    text = f"{why}: " + "; ".join(w["text"] for w in waiters)
    if over:
        text += f"; rank{'s' * (len(over) > 1)} {', '.join(over)} {'have' if len(over) > 1 else 'has'} returned"
    return Finding(
        "deadlock",
        tuple(w["rank"] for w in waiters),
        tuple(w["where"] for w in waiters),
        text,
        "every wait needs a signal that is sent on all paths, whatever the order in which blocks and ranks run",
        accesses=tuple(waiters),
    )


def _together(entries: Sequence[tuple[Task, Site, str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Merge entries of the same site, predicate and block into one waiter."""
    groups: dict[Any, list[tuple[Task, Site, str, dict[str, Any]]]] = {}
    for entry in entries:
        task, site, predicate, _ = entry
        key = task.rank, task.block, task.launch and task.launch.number, site, predicate
        groups.setdefault(key, []).append(entry)
    return [_waiter([e[0] for e in same], *same[0][1:]) for same in groups.values()]


def _waiter(tasks: list[Task], site: Site, predicate: str, more: dict[str, Any]) -> dict[str, Any]:
    task, warps = tasks[0], [str(t.warp) for t in tasks if t.warp >= 0]
    name = task.launch.name if task.launch is not None else "?"
    part = f" (warp{'s' * (len(warps) > 1)} {', '.join(warps)})" if warps else ""
    return _entry(task, site, f"rank {task.rank}, block {task.block} of {name}{part} {predicate}", **more)


def _block(task: Task, memory: Memory) -> tuple[Site, str, dict[str, Any]]:
    poll = _unmet(task)
    if task.waits is not None:
        return task.waits, f"waits for threads of its block at {task.waits.text}", {}
    if poll is None:
        return Site(()), "never runs again", {}
    address, actual, expected, relation = _values(poll)
    region = memory.region(address, address + 1, task.launch.private if task.launch is not None else [])
    place = region.label(address - region.base) if region is not None else "?"
    wanted = f"expected {_hex(expected)}, found {_hex(actual)}" if expected is not None else f"found {_hex(actual)}"
    more = {"address": address, "place": place, "expected": expected, "found": actual, "relation": relation}
    return poll.site, f"waits at {poll.site.text} for {place} ({address:#x}): {wanted}", more


def _running(task: Task) -> tuple[Site, str, dict[str, Any]]:
    site = task.last_poll.site if task.last_poll is not None else Site(())
    looked = f", which last looked at something new at {site.text}" if task.last_poll is not None else ""
    return site, f"runs on and on{looked}", {}


def _not_started(task: Task) -> tuple[Site, str, dict[str, Any]]:
    return Site(()), "waits for a place on the device", {}


def _waits_for_launch(host: Task, busy: set[int]) -> bool:
    """True if host code waits for a launch: within a launch, or after the end of a function whose kernels have not
    ended."""
    return host.launch is not None or (host.host_site == NOWHERE and host.rank in busy)


def _host(host: Task, busy: bool) -> dict[str, Any]:
    """The entry of host code. If a block of its rank waits (`busy`), it may wait for this block, else for another
    rank."""
    why = "" if busy else " for the other ranks"
    return _entry(host, host.host_site, f"rank {host.rank}'s host code waits{why} at {host.host_site.where}")


def _entry(task: Task, site: Site, text: str, **more: Any) -> dict[str, Any]:
    return {"rank": task.rank, "block": task.block, "where": site.where, "chain": site.text, "text": text, **more}


def _unmet(task: Task) -> Poll | None:
    """The poll, within the task's present loop, whose comparison has failed; else the last poll."""
    polls = task.loop() or list(task.polls.values())
    return next((p for p in polls if p.late().any()), polls[-1] if polls else task.last_poll)


def _values(poll: Poll) -> tuple[int, int, int | None, str]:
    """(address, actual, expected, relation) of the first element whose awaited value has not arrived."""
    addresses, late, lanes = poll.access.addresses, poll.late(), poll.access.lanes
    if late.any() and poll.actual is not None and poll.expected is not None:
        at = int(np.flatnonzero(late)[0])
        actual, expected = (int(np.broadcast_to(v, lanes.shape)[lanes][at]) for v in (poll.actual, poll.expected))
        return int(addresses[at]), actual, expected, poll.relation
    raw = np.frombuffer(poll.values, np.uint8)[: poll.access.itemsize]
    return int(addresses[0]), int.from_bytes(raw.tobytes(), "little"), None, ""


def _hex(value: int | None) -> str:
    return "nothing" if value is None else str(value) if abs(value) < 100_000 else hex(value)
