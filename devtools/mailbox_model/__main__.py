from __future__ import annotations

import sys

from devtools.mailbox_model import cases
from devtools.mailbox_model.explore import explore


def main() -> None:
    wrong = 0
    for case in cases():
        verdict, states = explore(case.ranks, case.want)
        wrong += verdict != case.want
        print(f"{'ok ' if verdict == case.want else 'BAD'} {case.name}: {verdict} ({states} states)", flush=True)
    sys.exit(int(wrong > 0))


if __name__ == "__main__":
    main()
