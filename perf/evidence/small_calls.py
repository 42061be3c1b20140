"""A few small calls of kernels, ranks as processes, for a tool that watches them: ... small_calls WORLD [COLLECTIVE]

Such a tool may have the kernels of a process run one after another, so none may wait for another one of its process.
"""

from __future__ import annotations

import sys

from tricomm.kernels.collectives import registry
from tricomm.kernels.collectives.registry import Kernel
from tricomm.perf.workers import talk

_SILENCE = 180.0  # seconds; a tool slows everything by orders of magnitude


def main(world_size: int, collective: str = "") -> int:
    """Exit code 1 if a result is wrong."""
    names = [k.name for k, ranks in pairs() if ranks == world_size and collective in ("", k.collective)]
    asked = {"tasks": ["small"], "kernel": "", "kernels": names, "dry_run": False}
    said = [record for _, record in talk("tricomm.perf.evidence.process_checks", world_size, asked, _SILENCE)]
    bad = [text for record in said for text in record["wrong"]]
    print("\n".join(bad))
    return 1 if bad or len(said) != world_size else 0


def pairs() -> list[tuple[Kernel, int]]:
    """Every kernel, with the fewest ranks that it can be run with."""
    return [(k, registry.CUBE_RANKS if k.needs_cube else 2) for k in registry.KERNELS]


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), *sys.argv[2:]))
