"""From the far ends of every GPU's NVLinks to a table of links between GPUs. No calls, no machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tricomm.topology.nvml import End, Fabric

Table = list[list[int]]


@dataclass(frozen=True)
class Gpu:
    """What NVML says of one GPU: its PCI address, the ends of its links, its place among NVSwitches."""

    address: str | None
    ends: Sequence[End]
    fabric: Fabric | None = None


def between(gpus: Sequence[Gpu], allowed: Callable[[int, int], bool | None]) -> tuple[Table, Table, list[str]]:
    """Links of each pair, directly and through switches, and notes in words.

    `allowed(i, j)` is NVML's word on peer access over NVLink, or None; False takes a pair's links away, for they are of
    no use to peers. It is asked only of pairs that have some.
    """
    direct = [[0] * len(gpus) for _ in gpus]
    through = [[0] * len(gpus) for _ in gpus]
    notes: list[str] = []
    known = {gpu.address for gpu in gpus}
    for i, one in enumerate(gpus):
        for j, other in enumerate(gpus[:i]):
            there, back = _ends_at(one, other.address), _ends_at(other, one.address)
            sure, likely = (min(_to_switches(gpu, known, unseen) for gpu in (one, other)) for unseen in (False, True))
            if not there and not back and not likely:
                continue
            if there != back:
                notes.append(f"devices {j} and {i} see {back} and {there} links to each other; the fewer count")
            word = allowed(i, j)
            if word is False:
                notes.append(f"devices {j} and {i}: linked, but NVML forbids peer access over NVLink")
                continue
            direct[i][j] = direct[j][i] = min(there, back)
            if _joined(one.fabric, other.fabric):
                # In a VM switches are out of sight: what nobody can name is taken for one if NVML affirms the pair.
                affirmed = word is True and not direct[i][j]
                through[i][j] = through[j][i] = likely if affirmed else sure
    return direct, through, notes


def _ends_at(gpu: Gpu, address: str | None) -> int:
    return sum(end.address == address and end.kind in ("gpu", "unseen") for end in gpu.ends if address is not None)


def _to_switches(gpu: Gpu, known: set[str | None], unseen: bool) -> int:
    return sum(
        end.kind == "switch" or (unseen and end.kind == "unseen" and (end.address is None or end.address not in known))
        for end in gpu.ends
    )


def _joined(one: Fabric | None, other: Fabric | None) -> bool:
    """Whether switches join two GPUs; where neither tells (before Hopper), all of a machine's switches are joined."""
    told = [fabric for fabric in (one, other) if fabric is not None]
    return all(fabric.ready for fabric in told) and len({fabric.domain for fabric in told}) <= 1
