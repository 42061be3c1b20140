"""`tricomm dashboard`: shows measurements and live jobs."""

from __future__ import annotations

import json
import sys
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import click

from tricomm.commands.common import FAILED, NO_DATA, NO_RUNS, UNJUDGED, OutputFile, ends_at_once, errors_told, usage

_FILE = click.Path(dir_okay=False, path_type=Path)
_WAYS = ("html", "serve", "changes", "prometheus", "trace", "grafana")


@click.command()
@click.option("--html", type=OutputFile(), help="Write the page there: one file that opens offline.")
@click.option("--serve", is_flag=True, help="Show the page on loopback, renewed while a benchmark or a job runs.")
@click.option("--port", type=click.IntRange(0, 65535), help="Of --serve [default: 8377; 0: any that is free].")
@click.option("--changes", is_flag=True, help="Print what got slower (exit code 1; 5: too few runs, 6: no data).")
@click.option("--since", help="Of --changes: an age like 7d or 12h, a weekday, or a date like 2026-01-31.")
@click.option("--json", "as_json", is_flag=True, help="Of --changes: print JSON.")
@click.option("--prometheus", is_flag=True, help="Print the metrics of live jobs; --serve has them at /metrics.")
@click.option("--trace", type=OutputFile(), help="Write the timed calls of jobs there, for ui.perfetto.dev.")
@click.option("--grafana", is_flag=True, help="Print the dashboard for Grafana, to be imported there.")
@click.option("--calls", help="Directory or prefix of all ranks' dumps: --html or --serve shows each call.")
@click.option("--history", type=_FILE, help="The history [default: history.sqlite in the XDG data directory].")
def dashboard(
    port: int | None, since: str | None, as_json: bool, calls: str | None, history: Path | None, **ways: Any
) -> None:
    """Show what was measured (the history of tricomm bench) and what live jobs do.

    A job is live here when it was started with TRICOMM_STATS=SECONDS; TRICOMM_STATS_EVERY=100 times each hundredth
    call of a shape.

    \b
    tricomm dashboard --html page.html
    tricomm dashboard --serve --port 9000
    tricomm dashboard --calls /dumps --html calls.html
    tricomm dashboard --changes --since monday
    TRICOMM_STATS=5 TRICOMM_STATS_EVERY=100 torchrun --nproc-per-node 8 train.py
    tricomm dashboard --prometheus > /var/lib/node_exporter/tricomm.prom
    tricomm dashboard --trace trace.json
    """
    chosen = [name for name in _WAYS if ways[name]]
    if len(chosen) != 1:
        raise click.UsageError(f"one of --{', --'.join(_WAYS)} is needed, {len(chosen)} were given")
    if port is not None and not ways["serve"]:
        raise click.UsageError("--port is for --serve")
    if (since is not None or as_json) and not ways["changes"]:
        raise click.UsageError("--since and --json are for --changes")
    if calls is not None and chosen[0] not in ("html", "serve"):
        raise click.UsageError("--calls is for --html and --serve")
    with errors_told("dashboard"):
        if ways["changes"]:
            _changes(history, since, as_json)
        else:
            _run(chosen[0], ways | {"calls": calls}, port, history)


def _run(way: str, ways: dict[str, Any], port: int | None, history: Path | None) -> None:
    with ends_at_once():
        from tricomm.perf.dashboard import chrome_trace, grafana, render
        from tricomm.perf.dashboard.source import Source

    if way == "grafana":
        click.echo(json.dumps(grafana.board(), indent=1))
        return
    source = usage(lambda: Source(history, partial(click.echo, err=True)))
    if way == "prometheus":
        click.echo(source.metrics(), nl=False)
    elif way == "trace":
        calls = usage(lambda: chrome_trace.write(source.jobs().jobs, ways["trace"]))
        lacking = "" if calls else "; jobs time their calls with TRICOMM_STATS=5 TRICOMM_STATS_EVERY=1"
        click.echo(f"{calls} timed calls written to {ways['trace']}{lacking}")
    elif way == "html":
        page = render.page(source.packed()) if ways["calls"] is None else usage(lambda: _calls(ways["calls"]))
        try:
            ways["html"].write_text(page, encoding="utf-8")
        except OSError as error:
            raise click.UsageError(f"--html {ways['html']}: {error.strerror}") from None
        nbytes = len(page.encode())
        size = f"{nbytes / 1e6:.1f} MB" if nbytes >= 1e6 else f"{nbytes / 1e3:.1f} kB"
        click.echo(f"{size} written to {ways['html']}")
    else:
        _serve(source, port, ways["calls"])


def _calls(prefix: str | None) -> str:
    from tricomm import env
    from tricomm.perf.dashboard import call_page, dumps

    return call_page.html(*dumps.read(env.dump_prefix() if prefix is None else prefix))


def _changes(history: Path | None, since: str | None, as_json: bool) -> None:
    with ends_at_once():
        from tricomm.perf import parsing
        from tricomm.perf.dashboard import changes
        from tricomm.perf.dashboard.source import Source

    begin, _ = usage(lambda: parsing.parse_when(since)) if since is not None else ("", "")
    source = usage(lambda: Source(history, partial(click.echo, err=True)))
    data = source.data()
    verdict = changes.judge(data, begin)
    click.echo(json.dumps(verdict.to_json(), indent=1) if as_json else "\n".join(verdict.lines()))
    for note in data["notes"]:
        click.echo(note, err=True)
    if not data["rows"]:
        if not source.unreadable:
            click.echo(NO_RUNS, err=True)
        sys.exit(NO_DATA)
    if verdict.slower or not verdict.judged:
        sys.exit(FAILED if verdict.slower else UNJUDGED)


def _serve(source: Any, port: int | None, calls: str | None) -> None:
    from tricomm.perf.dashboard import render, serve

    wanted = serve.PORT if port is None else port

    @lru_cache(maxsize=1)  # several MB, made once for the same data
    def page(data: str) -> bytes:
        return render.page(data, serve.RENEW).encode()

    pages, data = lambda: page(source.packed()), lambda: source.packed().encode()
    with serve.Server(wanted, pages, data, source.metrics, lambda: _calls(calls).encode()) as server:
        render.page("")  # if Plotly is missing, raises now and not at the first request
        click.echo(f"{server.url} until you press Ctrl-C")
        server.serve_forever()
