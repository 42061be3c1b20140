"""The command `tricomm`, also as `python -m tricomm`. Without the extra `cli` it says that it needs it."""

from __future__ import annotations

import sys
from importlib.util import find_spec

UNSUPPORTED = 3  # as `commands.common`, which needs click


def main() -> None:
    missing = [package for package in ("click", "rich") if find_spec(package) is None]
    if missing:
        print(f"tricomm: the command line needs {' and '.join(missing)}: pip install 'tricomm[cli]'", file=sys.stderr)
        sys.exit(UNSUPPORTED)
    from tricomm import cli

    cli.main()


if __name__ == "__main__":
    main()
