from __future__ import annotations

from functools import partial

from devtools.every_order import compare
from devtools.mailbox_model import cases, residency, shrink, shrink_calls
from devtools.mailbox_model.explore import explore


def main() -> None:
    words = ((case.name, case.want, partial(explore, case.ranks)) for case in cases())
    compare((*words, *residency.cases(), *shrink.cases(), *shrink_calls.cases()))


if __name__ == "__main__":
    main()
