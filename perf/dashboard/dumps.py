"""The calls of groups as all their ranks have recorded them, from the ranks' dumps of the flight recorder.

A dump is a pickle, because torch's analyser reads no other format. It is read as plain data.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tricomm import typed_json
from tricomm.errors import InvalidArgument
from tricomm.metrics.flight_document import VERSION
from tricomm.perf.dashboard import plain_pickle

_MOST_BYTES = 256 << 20


@dataclass(frozen=True)
class RecordedCall:
    """An entry of a dump, by torch's names. `tricomm`: operation, root, algorithm."""

    process_group: tuple[str, str]
    collective_seq_id: int
    profiling_name: str
    is_p2p: bool
    timeout_ms: int
    input_sizes: tuple[tuple[int, ...], ...]
    output_sizes: tuple[tuple[int, ...], ...]
    input_dtypes: tuple[str, ...]
    time_created_ns: int
    time_discovered_started_ns: int | None
    time_discovered_completed_ns: int | None
    tricomm: str

    def __post_init__(self) -> None:
        times = self.time_created_ns, self.time_discovered_started_ns, self.time_discovered_completed_ns
        if min(time or 0 for time in (*times, self.timeout_ms)) < 0:
            raise ValueError("a time is negative")

    @property
    def text(self) -> str:
        """The call in words."""
        both = [["x".join(map(str, size)) for size in sizes] for sizes in (self.input_sizes, self.output_sizes)]
        sizes = " to ".join(dict.fromkeys(map("+".join, both)))
        words = (self.profiling_name.removeprefix("nccl:"), sizes, *dict.fromkeys(self.input_dtypes), self.tricomm)
        return " ".join(filter(None, words))

    @property
    def agreed(self) -> str:
        """The part of the text that is equal on all ranks: without sizes for an all-to-all; empty for a message."""
        return "" if self.is_p2p else self.profiling_name if "all_to_all" in self.profiling_name else self.text


@dataclass(frozen=True)
class DumpedGroup:
    name: str
    ranks: str

    def __post_init__(self) -> None:
        self.members()

    def members(self) -> tuple[int, ...]:
        return typed_json.decode(self.ranks, tuple[int, ...])


@dataclass(frozen=True)
class RankDump:
    """A rank's dump, by torch's names."""

    pg_config: dict[str, DumpedGroup]
    entries: tuple[RecordedCall, ...]
    written_ns: int
    boot: str


@dataclass(frozen=True)
class GroupCalls:
    """The calls of a group: `calls[number][rank]`. For each rank with a dump: when it `dumped`, its `first` number."""

    name: str
    ranks: tuple[int, ...]
    dumped: dict[int, int]
    first: dict[int, int]
    calls: dict[int, dict[int, RecordedCall]]

    def arrivals(self, number: int) -> list[tuple[int, int]]:
        """(time, rank) of the ranks that made the call, the first one first."""
        return sorted((call.time_created_ns, rank) for rank, call in self.calls[number].items())

    def problem(self, number: int) -> str:
        """Why this call has not succeeded; empty if it has."""
        calls, arrivals, forms = self.calls[number], self.arrivals(number), defaultdict[str, list[int]](list)
        for rank, call in calls.items():
            forms[call.agreed].append(rank)
        if len(forms) > 1:
            return "; ".join(f"{of(ranks)} made {calls[ranks[0]].text}" for ranks in forms.values())
        # A full ring has dropped a rank's first calls, and a dump may be older than the call.
        lacking = [r for r, first in self.first.items() if r not in calls and number >= first]
        if absent := [rank for rank in lacking if self.dumped[rank] > arrivals[0][0]]:
            return f"{of(absent)} had not made this call"
        limit = calls[arrivals[0][1]].timeout_ms
        if arrivals[-1][0] - arrivals[0][0] > limit * 1_000_000:
            return f"arrivals are further apart than the timeout of {limit / 1e3:g} s: are these dumps of one job?"
        running = [rank for rank, call in calls.items() if not call.time_discovered_completed_ns]
        return f"{of(running)} had not ended this call" if running else ""


def of(ranks: Iterable[int]) -> str:
    """`rank 1`, or `ranks 1, 2`."""
    numbers = [str(rank) for rank in ranks]
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(numbers)}"


def read(prefix: str) -> tuple[list[GroupCalls], list[str]]:
    """Read the dumps `prefix` + rank, or all of a directory: the groups, and notes about files and calls left out.

    Raises `InvalidArgument` if there is no dump, or two of one rank.
    """
    path, notes, dumps = Path(prefix), list[str](), dict[int, tuple[Path, RankDump]]()
    folder, start = (path, "") if path.is_dir() else (path.parent, path.name)
    for file in sorted(folder.iterdir()) if folder.is_dir() else ():
        rank = re.search("[0-9]+$", file.name)
        if rank is None or not file.name.startswith(start) or not file.is_file():
            continue
        try:
            with file.open("rb") as opened:
                dump = _decoded(opened.read(_MOST_BYTES + 1))
        except (OSError, ValueError) as error:
            notes.append(f"{file} is no dump of this tricomm and is ignored: {error}")
            continue
        if (other := dumps.setdefault(int(rank.group()), (file, dump))[0]) != file:
            raise InvalidArgument(f"{other} and {file} are of one rank: name the prefix of one job's dumps")
    if not dumps:
        raise InvalidArgument(" ".join([f"no dumps at {prefix}: faults and tricomm.dump() write them.", *notes]))
    if len({dump.boot for _, dump in dumps.values()}) > 1:
        notes.append("The dumps are of several hosts, whose clocks may differ.")
    return _groups(dumps, notes), notes


def _decoded(content: bytes) -> RankDump:
    if len(content) > _MOST_BYTES:
        raise ValueError(f"it has more than {_MOST_BYTES} bytes")
    raw = plain_pickle.decode(content)
    if isinstance(raw, dict) and raw.get("version") != VERSION:
        raise ValueError(f"it has version {raw.get('version')!r:.20}, not {VERSION}")
    return typed_json.convert(raw, RankDump)


def _groups(dumps: dict[int, tuple[Path, RankDump]], notes: list[str]) -> list[GroupCalls]:
    groups: dict[tuple[str, str], GroupCalls] = {}
    for rank, (file, dump) in sorted(dumps.items()):
        mine = {}
        for group in dump.pg_config.values():
            if rank in (ranks := group.members()):
                known = groups.setdefault((group.name, group.ranks), GroupCalls(group.name, ranks, {}, {}, {}))
                known.dumped[rank], known.first[rank] = dump.written_ns, 0
                mine[group.name] = known
        for call in dump.entries:
            if of_group := mine.get(call.process_group[0]):
                number = call.collective_seq_id
                of_group.calls.setdefault(number, {})[rank] = call
                of_group.first[rank] = min(number, of_group.first[rank] or number)
        if missed := sum(call.process_group[0] not in mine for call in dump.entries):
            notes.append(f"{file} has {missed} calls of groups without rank {rank}, which are ignored.")
    return list(groups.values())
