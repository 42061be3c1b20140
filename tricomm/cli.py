"""The `tricomm` command: its subcommands, and the errors that they do not handle.

A command imports its modules when it runs, so that they neither slow down other commands nor make them fail.
"""

from __future__ import annotations

import os
import sys

import click

from tricomm import __version__, gone
from tricomm.commands.bench import bench
from tricomm.commands.check import check
from tricomm.commands.common import FAILED, INTERRUPTED, exit_code
from tricomm.commands.compare import compare
from tricomm.commands.compile import compile
from tricomm.commands.completion import completion
from tricomm.commands.dashboard import dashboard
from tricomm.commands.doctor import doctor
from tricomm.commands.info import info
from tricomm.commands.kernels import kernels
from tricomm.commands.predict import predict
from tricomm.commands.tune import tune


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="tricomm")
def cli() -> None:
    """Single-node multi-GPU collectives in Triton: measure them, explain them, look at their machine code.

    \b
    Exit codes: 0 fine, 1 a check failed or something got slower, 2 usage, 3 the environment lacks something,
    4 a wrong result, 5 too few runs to judge, 6 no data to compare, 130 interrupted.

    \b
    tricomm doctor
    tricomm bench --nproc 4 --algorithm all --protocol all
    tricomm dashboard --html page.html
    eval "$(tricomm completion bash)"
    """


for command in (bench, check, compare, compile, completion, dashboard, doctor, info, kernels, predict, tune):
    cli.add_command(command)


def main() -> None:
    """Entry point of the console script."""
    try:
        cli(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        if isinstance(error, click.UsageError) and (why := gone.command(sys.argv[1:])):
            click.echo(why, err=True)
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # the reader has ended, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # flushing buffered output would fail again
        sys.exit(FAILED)
    except OSError as error:
        click.echo(f"tricomm: {error}", err=True)
        sys.exit(FAILED)
    except Exception as error:
        code = exit_code(error)
        if code is None:
            raise
        click.echo(f"tricomm: {error}", err=True)
        sys.exit(code)
