"""`tricomm compile`: compiles the machine code of a job in advance."""

from __future__ import annotations

import time
from pathlib import Path

import click

from tricomm.commands.common import ends_at_once, errors_told, told_every, usage


@click.command()
@click.option("--arch", default="sm_90", show_default=True, help="The GPUs' architecture, as tricomm info names it.")
@click.option("--world-size", type=int, default=8, show_default=True, help="Ranks of a group.")
@click.option("--for", "engine", default="all", show_default=True, help="Whose calls: vllm, sglang, ddp, or all.")
@click.option("--collective", default="", help="Of these only some: a list.")
@click.option("--dtype", default="", help="Of these only some: a list.")
@click.option("--hidden", default="", help="Rows of all_reduce_rms_norm: a list of elements, as 4096,8192.")
@click.option("--wire", type=click.Choice(["fp8", "int8", "fp8_gather"]), help="Also the calls all_reduce(wire=).")
@click.option("--out", required=True, type=click.Path(file_okay=False, path_type=Path), help="Directory to write.")
@click.option("--wheel", is_flag=True, help="Make a wheel of the package tricomm_cubins there, too.")
def compile(arch: str, world_size: int, engine: str, out: Path, wheel: bool, **only: str | None) -> None:
    """Compile the kernels that an engine's calls can choose, without a GPU, so that a job compiles none of them.

    Of groups with default options, on boxes of every kind of links. Files that the directory has already are kept.
    The directory is for TRICOMM_CUBINS; the wheel, once installed, is found without it. A kernel
    takes a core some seconds, an engine has a few hundred.

    \b
    tricomm compile --arch sm_90 --world-size 8 --for vllm --out cubins
    tricomm compile --arch sm_100 --for ddp --collective all_reduce --dtype bfloat16,float32 --out cubins --wheel
    """
    with ends_at_once():
        from rich.console import Console
        from rich.progress import track

        from tricomm.core import cubins
        from tricomm.errors import ResourceError
        from tricomm.perf import parsing, row_calls
        from tricomm.perf.machine_code import prebuild
        from tricomm.store import files

    began = time.monotonic()

    def asked() -> prebuild.Order:
        files.refuse_shared(out, "machine code")
        collective, dtype, hidden = only["collective"], only["dtype"], only["hidden"]
        collectives = parsing.parse_names(collective, prebuild.COLLECTIVES, "collective") if collective else ()
        dtypes = parsing.parse_names(dtype, prebuild.DTYPES, "dtype", parsing.DTYPES) if dtype else ()
        rows = tuple(form.hidden for form in row_calls.parse_forms(hidden, None)) if hidden else ()
        return prebuild.Order(arch, world_size, engine, collectives, dtypes, rows, only["wire"] or "")

    order = usage(asked)
    console = Console(stderr=True)
    done: list[tuple[int, bool]] = []
    count = 0

    def state() -> str:
        return f"{len(done)} of {count or '?'} kernels"

    with errors_told("compile"), told_every(state, console.is_terminal):
        count = len(prebuild.ordered(order))
        built = prebuild.build_all(order, count, out)
        if console.is_terminal:
            built = iter(track(built, "compiling", count, console=console, transient=True))
        done.extend(built)
        try:
            made = prebuild.wheel(out) if wheel else None
        except OSError as error:
            raise ResourceError(f"the wheel cannot be written: {error}") from None
    new, nbytes = sum(fresh for _, fresh in done), sum(size for size, _ in done)
    if made is not None:
        click.echo(f"pip install {made}")
    else:
        click.echo(f"export {cubins.VARIABLE}={out.resolve()}")
    seconds = time.monotonic() - began
    kernels = f"{count} kernel{'s' * (count != 1)}"
    click.echo(f"{kernels} ({new} new) for {arch}, {world_size} ranks: {seconds:.1f} s, {nbytes} bytes in {out}")
