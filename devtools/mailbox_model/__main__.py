from __future__ import annotations

from functools import partial

from devtools.every_order import compare
from devtools.mailbox_model import cases
from devtools.mailbox_model.explore import explore


def main() -> None:
    compare((case.name, case.want, partial(explore, case.ranks)) for case in cases())


if __name__ == "__main__":
    main()
