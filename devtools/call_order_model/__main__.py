from __future__ import annotations

from functools import partial

from devtools.call_order_model import cases
from devtools.call_order_model.events import explore
from devtools.every_order import compare


def main() -> None:
    compare((case.name, case.want, partial(explore, case)) for case in cases())


if __name__ == "__main__":
    main()
