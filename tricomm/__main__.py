"""The command `tricomm`, also as `python -m tricomm`. Without the extra `cli` it prints that it is needed."""

from __future__ import annotations

import sys

_UNSUPPORTED, _INTERRUPTED = 3, 130  # as in `commands.common`, which needs click


def main() -> None:
    try:
        import click  # noqa: F401
        import rich  # noqa: F401

        from tricomm import cli
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(_INTERRUPTED)
    except ModuleNotFoundError as error:
        if error.name not in ("click", "rich"):
            raise
        print("tricomm: the command line needs click and rich: pip install 'tricomm[cli]'", file=sys.stderr)
        sys.exit(_UNSUPPORTED)
    cli.main()


if __name__ == "__main__":
    main()
