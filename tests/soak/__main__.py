"""`python -m tests.soak --minutes 10`: random collectives and random faults, on 3 and 4 ranks without a GPU."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path

from tests.soak.faults import FAULTS
from tests.soak.groups import ROUTES
from tests.soak.growth import MEBIBYTE
from tests.soak.soak import Settings, Soak


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    add = parser.add_argument
    add("--minutes", type=float, default=10.0)
    add("--every", type=float, default=30.0, help="seconds of a group's life; each ends with a fault (default 30)")
    add("--seed", type=int, help="repeats the same groups, calls and faults; their moments depend on the machine")
    add("--faults", default=",".join(FAULTS), help=f"which, by comma (default all: {', '.join(FAULTS)})")
    add("--routes", default=",".join(ROUTES), help=f"kinds of group, by comma (default all: {', '.join(ROUTES)})")
    add("--rounds", type=int, help="end after so many groups")
    add("--slack", type=float, default=5.0, help="seconds beyond a promised limit, because the machine is busy")
    add("--memory", type=float, default=16.0, help="MiB that a process may grow by")
    add("--inject", default="", help="a mistake to be found: wrong, hang, lost, unnamed, descriptors, ...")
    add("--json", type=Path, help="write the figures to this file")
    given = parser.parse_args(arguments)
    for name, known in (("faults", FAULTS), ("routes", ROUTES)):
        unknown = set(getattr(given, name).split(",")) - set(known)
        if unknown:
            parser.error(f"--{name}: {', '.join(sorted(unknown))}: there is {', '.join(known)}")
    seed = random.SystemRandom().randrange(1 << 31) if given.seed is None else given.seed
    print(f"seed {seed}", file=sys.stderr, flush=True)
    settings = Settings(
        tuple(given.faults.split(",")),
        tuple(given.routes.split(",")),
        given.minutes * 60,
        given.every,
        seed,
        given.slack,
        int(given.memory * MEBIBYTE),
        given.rounds,
        tuple(filter(None, given.inject.split(","))),
    )
    folder = Path(tempfile.mkdtemp(prefix="tricomm-soak-"))
    totals = Soak(settings, folder).run()
    print(totals.table())
    if given.json is not None:
        given.json.write_text(totals.json())
    if not totals.ok:
        print(f"logs of the ranks: {folder}", file=sys.stderr)
    return 0 if totals.ok else 1


if __name__ == "__main__":
    sys.exit(main())
