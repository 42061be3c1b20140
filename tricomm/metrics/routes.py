"""How many calls went to the kernels, to NCCL and to Gloo, for the whole process."""

from __future__ import annotations

from tricomm.metrics.counters import bucket

KERNELS, NCCL, GLOO = "kernels", "nccl", "gloo"

_counts: dict[tuple[str, str], list[int]] = {}
_natives: dict[tuple[str, str, int], list[int]] = {}  # calls and bytes, by route, collective and bucket of sizes


def count(path: str, collective: str, nbytes: int | None) -> None:
    """Count one call of `nbytes` bytes of input; None if ranks may differ in it."""
    counter(path, collective)[0] += 1
    if path != KERNELS:  # a communicator counts its own by size
        calls = _natives.setdefault((path, collective, bucket(nbytes or 0)), [0, 0])
        calls[0], calls[1] = calls[0] + 1, calls[1] + (nbytes or 0)


def counter(path: str, collective: str) -> list[int]:
    """The one number of a route's calls, in a list: to be counted up without a look-up."""
    return _counts.setdefault((path, collective), [0])


def stats() -> dict[str, dict[str, int]]:
    """How many calls of this process went where: {"kernels": {"all_reduce": 3}, "gloo": {...}, "nccl": {...}}.

    Of communicators and of c10d groups alike; a c10d call that runs over the kernels counts once.
    """
    found: dict[str, dict[str, int]] = {KERNELS: {}, NCCL: {}, GLOO: {}}
    for (path, collective), (count,) in list(_counts.items()):
        if count:
            found[path][collective] = count
    return found


def by_size() -> dict[tuple[str, str, int], tuple[int, int]]:
    """Calls and bytes that NCCL and Gloo got, by (route, collective, bucket of sizes); 0 where ranks' sizes differ."""
    return {key: (calls, nbytes) for key, (calls, nbytes) in list(_natives.items())}
