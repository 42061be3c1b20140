"""`tricomm predict`: predicts times on a machine that is not at hand."""

from __future__ import annotations

import json
from typing import Any

import click

from tricomm.commands.common import check_row_options, ends_at_once, given, usage


@click.command()
@click.option(
    "--gpu", default="h100", show_default=True, help="v100, a100, h100, h200, b200, gb200, pcie3, pcie4 or pcie5."
)
@click.option("--world-size", type=click.IntRange(1, 16), default=8, show_default=True, help="Ranks.")
@click.option("--collective", default="all_reduce", show_default=True, help="all_reduce, a list, or all.")
@click.option("--sizes", default="1K:64M:4", show_default=True, help="first:last:factor in bytes, or a comma list.")
@click.option("--hidden", type=click.IntRange(1), default=8192, show_default=True, help="Row of all_reduce_rms_norm.")
@click.option("--quantize", type=click.Choice(["fp8", "fp8_per_token", "nvfp4"]), help="Of all_reduce_rms_norm.")
@click.option("--top-k", type=click.IntRange(1, 255), help="Of all_reduce_rms_norm: sum so many experts' rows first.")
@click.option(
    "--wire", type=click.Choice(["fp8", "int8", "fp8_gather"]), help="Quantise all_reduce, as Options(wire=)."
)
@click.option("--mode", type=click.Choice(["graph", "eager"]), default="graph", show_default=True)
@click.option(
    "--check", is_flag=True, help="Compare the model with published times; takes GPUs, ranks and sizes from them."
)
@click.option("--from-code", is_flag=True, help="Model it from the compiled kernels, executed with a clock per warp.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def predict(
    context: click.Context,
    /,
    check: bool,
    from_code: bool,
    as_json: bool,
    hidden: int,
    quantize: str | None,
    top_k: int | None,
    wire: str | None,
    **asked: Any,
) -> None:
    """Is it worth it on such a box? Predicts every kernel's time and NCCL's, and marks what would run.

    From counted bytes, hops and barriers: nothing is measured, no GPU is needed. With --from-code the kernels are
    compiled and executed on the PTX machine instead, which takes about a minute and shows the parts of the critical
    path and the bytes in flight.

    \b
    tricomm predict --gpu h100 --world-size 8 --collective all_reduce
    tricomm predict --gpu pcie4 --world-size 4 --sizes 1K,64K --mode eager
    tricomm predict --collective all_reduce_rms_norm --hidden 8192 --quantize fp8 --sizes 16K,512K
    tricomm predict --check
    tricomm predict --from-code --sizes 1K,64K,1M
    """
    with ends_at_once():
        from tricomm.perf.cost_model import forecast, kernel_time
        from tricomm.perf.row_calls import RowForm

    checker: Any = kernel_time
    forecaster: Any = forecast
    if from_code:  # needs the extra `explorer`
        from tricomm.explorer.timing import code_forecast

        checker = forecaster = code_forecast
    if check:
        unused = [option for name, option in given(context).items() if name not in ("check", "from_code", "as_json")]
        if unused:
            raise click.UsageError(
                f"--check takes machines, sizes and kernels from the published rows, so {', '.join(unused)} would not "
                "be looked at; leave it out (--from-code and --json work)"
            )
        rows = checker.check()
        click.echo(json.dumps(kernel_time.to_json(rows), indent=1) if as_json else "\n".join(checker.report(rows)))
        return
    check_row_options(context, usage(lambda: forecast.names(asked["collective"])))
    if top_k is not None and not from_code:
        raise click.UsageError("--top-k: the time of a sum of experts' rows is modelled from the code; add --from-code")
    form = RowForm(hidden, quantize or "", top_k or 0)
    predicted = usage(lambda: forecaster.forecast(**asked, form=form, wire=wire or ""))
    click.echo(json.dumps(predicted.to_json(), indent=1) if as_json else "\n".join(predicted.lines()))
