"""Mutants of dependent launches (waits removed or moved after an access, signals moved), checked by the explorer.

    python -m devtools.dependent_mutants [KERNEL ...]       e.g. all_reduce_one_shot_ll; default: all

Each kernel runs in the chains of `tests/explorer/dependent/chains.py`. Prints a row of a Markdown table per mutant, and
exits with 1 if one is not reported. Accesses after the first branch are left out, because a wait after one of them is
also after the earlier ones. A moved signal does not change the order of accesses, but how many kernels of a stream are
resident at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import click

from tests.explorer.compiled.ptx_mutants import changed
from tests.explorer.dependent import chains
from tests.explorer.dependent.test_dependent_collectives import KERNELS
from tricomm.explorer.compiled.launches import Launches
from tricomm.kernels.collectives.registry import Kernel

SCHEDULES = 8
AT_ONCE = 2  # kernels of a stream: one runs, and the next one waits for its end


@contextmanager
def counted() -> Iterator[list[int]]:
    """For each launch, the number of launches of its stream that are running when it starts, including itself."""
    counts: list[int] = []
    start = Launches.start

    def count(self: Launches, launch, *how) -> None:  # type: ignore[no-untyped-def]
        start(self, launch, *how)
        same = (launch.rank, launch.stream)
        counts.append(sum((other.launch.rank, other.launch.stream) == same for other in self._alive))

    with patch.object(Launches, "start", count):
        yield counts


def mutants(kernel: Kernel) -> Iterator[tuple[str, Callable[[str], str]]]:
    """The mutants of a kernel: names of changes to its PTX, and the changes."""
    yield "unchanged", str
    yield "no wait", chains.without_wait
    for number, access in enumerate(chains.accesses(chains.text_of(kernel))):
        yield f"wait after `{' '.join(access[0].split('//')[0].split())}`", chains.waiting_after(number)
    yield "no signal", chains.without_signal
    yield "signal before the wait", chains.signal_first


def verdict(kernel: Kernel, name: str, change: Callable[[str], str]) -> str:
    """The kinds of findings; empty for none."""
    with counted() as counts, changed(f"{kernel.name} {name}", change, kernel.function.__name__):
        kinds = {finding.kind for finding in chains.explored(kernel, SCHEDULES).findings}
    if "signal" in name and max(counts) > AT_ONCE:  # a moved wait also comes after the signal
        kinds.add(f"{max(counts)} kernels at once")
    return ", ".join(sorted(kinds))


def fails(kernel: Kernel, name: str, said: str) -> bool:
    """True if a mutant is not reported, or a correct kernel is. Exceptions: without a signal, the next kernel only
    begins later; messages and cube meshes also load words that no kernel writes."""
    if name in ("unchanged", "no signal"):
        return bool(said)
    return not said and not ((kernel.pairwise or kernel.needs_cube) and "`ld." in name)


@click.command()
@click.argument("kernels", nargs=-1, metavar="[KERNEL]...", type=click.Choice([kernel.name for kernel in KERNELS]))
def main(kernels: tuple[str, ...]) -> None:
    """Print the findings of each mutant of KERNELS."""
    failed = 0
    print("| kernel | mutant | reported |\n|---|---|---|")
    for kernel in [kernel for kernel in KERNELS if not kernels or kernel.name in kernels]:
        for name, change in mutants(kernel):
            said = verdict(kernel, name, change)
            wrong = fails(kernel, name, said)
            print(f"| {kernel.name} | {name} | {said or 'nothing'}{' (WRONG)' * wrong} |", flush=True)
            failed += wrong
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
