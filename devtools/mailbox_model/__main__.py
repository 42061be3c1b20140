from __future__ import annotations

from functools import partial

from devtools.every_order import compare
from devtools.mailbox_model import cases, replace, residency, shrink, shrink_calls
from devtools.mailbox_model.explore import explore


def main() -> None:
    words = ((case.name, case.want, partial(explore, case.ranks)) for case in cases())
    agreements = *shrink.cases(), *shrink_calls.cases(), *replace.cases()
    compare((*words, *residency.cases(), *agreements))


if __name__ == "__main__":
    main()
