"""The command `tricomm`, also as `python -m tricomm`. Without the extra `cli` it says that it needs it."""

from __future__ import annotations

import sys

_UNSUPPORTED = 3  # as in `commands.common`, which needs click


def main() -> None:
    try:
        import click  # noqa: F401
        import rich  # noqa: F401
    except ModuleNotFoundError:
        print("tricomm: the command line needs click and rich: pip install 'tricomm[cli]'", file=sys.stderr)
        sys.exit(_UNSUPPORTED)
    from tricomm import cli

    cli.main()


if __name__ == "__main__":
    main()
