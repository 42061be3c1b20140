"""The report of a deadlock: the tasks that wait, and the memory that each of them polls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tricomm.explorer.memory_model.regions import Memory
from tricomm.explorer.memory_model.source_lines import Site
from tricomm.explorer.report.findings import Finding
from tricomm.explorer.schedule.tasks import Poll, State, Task


def deadlock(blocks: Sequence[Task], hosts: Sequence[Task], memory: Memory, why: str) -> Finding:
    """A finding that names every waiting task: rank, block, address, expected value and actual value."""
    waiters = [_block(task, memory) for task in blocks if task.state in (State.PARKED, State.STOPPED) and task.started]
    waiters += [_not_started(task) for task in blocks if not task.started and task.state is State.READY]
    waiters += [_host(task) for task in hosts if task.state is State.WAITING and task.launch is None]
    waiters += [_running(task) for task in blocks if task.started and task.state is State.READY]
    over = [str(h.rank) for h in hosts if h.state is State.DONE]
    text = f"{why}: " + "; ".join(w["text"] for w in waiters)
    if over:
        text += f"; over already: rank{'s' * (len(over) > 1)} {', '.join(over)}"
    return Finding(
        "deadlock",
        tuple(w["rank"] for w in waiters),
        tuple(w["where"] for w in waiters),
        text,
        "every wait needs a signal that is sent on all paths, whatever the order in which blocks and ranks run",
        accesses=tuple(waiters),
    )


def _block(task: Task, memory: Memory) -> dict[str, Any]:
    poll = _unmet(task)
    name = task.launch.name if task.launch is not None else "?"
    if poll is None:
        return _entry(task, Site(()), f"rank {task.rank}, block {task.block} of {name} never runs again")
    address, found, expected, relation = _values(poll)
    region = memory.region(address, address + 1, [])
    place = region.label(address - region.base) if region is not None else "?"
    wanted = f"expected {_hex(expected)}, found {_hex(found)}" if expected is not None else f"found {_hex(found)}"
    text = (
        f"rank {task.rank}, block {task.block} of {name} waits at {poll.site.text} for {place} ({address:#x}): {wanted}"
    )
    more = {"address": address, "place": place, "expected": expected, "found": found, "relation": relation}
    return _entry(task, poll.site, text, **more)


def _running(task: Task) -> dict[str, Any]:
    name = task.launch.name if task.launch is not None else "?"
    site = task.last_poll.site if task.last_poll is not None else Site(())
    looked = f", which last looked at something new at {site.text}" if task.last_poll is not None else ""
    return _entry(task, site, f"rank {task.rank}, block {task.block} of {name} runs on and on{looked}")


def _not_started(task: Task) -> dict[str, Any]:
    name = task.launch.name if task.launch is not None else "?"
    return _entry(task, Site(()), f"rank {task.rank}, block {task.block} of {name} waits for a place on the device")


def _host(task: Task) -> dict[str, Any]:
    text = f"rank {task.rank}'s host code waits for the other ranks at {task.host_site.where}"
    return _entry(task, task.host_site, text)


def _entry(task: Task, site: Site, text: str, **more: Any) -> dict[str, Any]:
    return {"rank": task.rank, "block": task.block, "where": site.where, "chain": site.text, "text": text, **more}


def _unmet(task: Task) -> Poll | None:
    """The poll whose comparison did not hold; else the last one."""
    polls = list(task.polls.values())
    return next((p for p in polls if p.late().any()), polls[-1] if polls else task.last_poll)


def _values(poll: Poll) -> tuple[int, int, int | None, str]:
    """(address, found, expected, relation) of the first element that is late."""
    addresses, late, lanes = poll.access.addresses, poll.late(), poll.access.lanes
    if late.any() and poll.found is not None and poll.expected is not None:
        at = int(np.flatnonzero(late)[0])
        found, expected = (int(np.broadcast_to(v, lanes.shape)[lanes][at]) for v in (poll.found, poll.expected))
        return int(addresses[at]), found, expected, poll.relation
    raw = np.frombuffer(poll.values, np.uint8)[: poll.access.itemsize]
    return int(addresses[0]), int.from_bytes(raw.tobytes(), "little"), None, ""


def _hex(value: int | None) -> str:
    return "nothing" if value is None else str(value) if abs(value) < 100_000 else hex(value)
