"""python -m tricomm.perf.evidence: run stages, and sum up what there is."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from tricomm.errors import InvalidArgument
from tricomm.perf.evidence import runner, summary
from tricomm.perf.evidence.stage import Settings
from tricomm.perf.evidence.stages import STAGES, find

_GOOD_DRY = ("ok", "incomplete", "skipped")


@click.command()
@click.option("--stage", "names", multiple=True, help="Only this stage; may be given several times.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("evidence"), show_default=True,
              help="Folder for results; a run that was cut off goes on there.")  # fmt: skip
@click.option("--peers", type=click.Path(exists=True, file_okay=False, path_type=Path),
              help="Folder with checkouts to compare with: kraken.")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Run every stage's code without a GPU; no number means anything.")
@click.option("--list", "listed", is_flag=True, help="Name the stages.")
def main(names: tuple[str, ...], out: Path, peers: Path | None, dry_run: bool, listed: bool) -> None:
    """Prove and measure tricomm on this machine.

    Exit code 1 where any stage is not ok, for a reason that its result names: something was wrong, crashed, hung, or
    is missing here. In a dry run what needs a GPU may be missing.
    """
    if listed:
        for stage in STAGES:
            click.echo(f"{stage.name:<16} {stage.title}")
        return
    try:
        stages = [find(name) for name in names] or list(STAGES)
    except InvalidArgument as error:
        click.echo(str(error), err=True)
        sys.exit(2)
    settings = Settings(out, peers, dry_run)
    good = True
    for stage in stages:
        click.echo(f"{stage.name}: {stage.title}" + (" (simulated)" if dry_run else ""))
        result = runner.run(stage, settings, click.echo)
        click.echo(f"{stage.name}: {result['status']}" + (f": {result['reason']}" if result["reason"] else ""))
        good = good and result["status"] in (_GOOD_DRY if dry_run else ("ok",))
        summary.write(out)
    click.echo(f"see {out / 'summary.md'}")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
