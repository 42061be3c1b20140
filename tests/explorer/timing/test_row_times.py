"""Fused calls modelled from their compiled code: bytes, parts, long calls, the command, and what is refused."""

import json
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner

from tests.marks import compiles
from tricomm.cli import cli
from tricomm.core.fused.fused_call import FUSED
from tricomm.errors import InvalidArgument
from tricomm.explorer.timing import row_times
from tricomm.kernels import layout
from tricomm.kernels.collectives import registry
from tricomm.perf import row_calls, units
from tricomm.perf.cost_model import machines, published, published_time
from tricomm.perf.cost_model.machines import MACHINES
from tricomm.perf.row_calls import RowForm
from tricomm.policy.row_shapes import ROW_BLOCKS

_H100, _ROW = MACHINES["h100"], RowForm(128, "fp8_per_token")
_KERNEL = registry.find(FUSED, "two_shot", "ll")


def test_a_long_call_is_extrapolated_from_its_first_rows_and_moves_the_bytes_of_the_formula() -> None:
    short = row_times.predict(_H100, _KERNEL, 2, 1, _ROW, torch.bfloat16)
    assert sum(short.parts) > _H100.hop and short.boundary > 0 and short.executed == 1.0
    plan = layout.plan(2, machines.ARENA_BYTES)
    counted = row_times.run(_H100, _KERNEL, 2, 6, _ROW, torch.bfloat16, replace(short.shape, blocks=1), plan)
    assert counted.moved == units.moved(_KERNEL, 2) * 6 * 128 * 2 and counted.headers > 0
    rows = 12 * ROW_BLOCKS  # eight rounds of a block are executed
    long = row_times.predict(_H100, _KERNEL, 2, rows, _ROW, torch.bfloat16)
    exact = row_times.run(_H100, _KERNEL, 2, rows, _ROW, torch.bfloat16, long.shape, plan)
    assert long.executed < 1 and sum(long.parts) == pytest.approx(exact.time_us, rel=0.1)
    assert long.time_us > short.time_us


@pytest.mark.exhaustive
def test_the_command_models_every_kernel_of_rows() -> None:
    asked = ["predict", "--collective", FUSED, "--hidden", "128", "--sizes", "256", "--from-code", "--world-size", "2"]
    modelled = CliRunner().invoke(cli, asked)
    assert modelled.exit_code == 0 and f"# {FUSED} norm@128, bfloat16" in modelled.output
    rows = [line.split() for line in modelled.output.splitlines() if line.strip().startswith("256 ")]
    kernels = [next(word for word in row if "/" in word) for row in rows]
    assert kernels == [f"{k.algorithm}/{k.protocol}" for k in registry.of(FUSED, 2) if compiles(k)]


def test_the_command_predicts_rows_and_refuses_rows_without_a_kernel() -> None:
    asked = ["predict", "--collective", FUSED, "--hidden", "128", "--quantize", "fp8_per_token", "--sizes", "1,9K"]
    result = json.loads(CliRunner().invoke(cli, [*asked, "--json"]).output)["results"]
    kernels = [k for k in registry.of(FUSED, 8) if compiles(k)]
    assert {row["size_bytes"] for row in result} == {256, 36 * 256} and len(result) == 2 * len(kernels)
    refused = CliRunner().invoke(cli, ["predict", "--collective", FUSED, "--hidden", "20"])
    assert refused.exit_code == 2 and "hidden=20: fused kernels take multiples of 8" in " ".join(refused.output.split())
    with pytest.raises(InvalidArgument, match="rows are named like norm@8192"):
        row_calls.parse("fp6@64")


def test_another_synchronization_costs_the_sum_of_its_steps() -> None:
    row = next(r for r in published.MEASUREMENTS if r.zero_copy and r.sync is not None)
    ours = replace(row, sync=published_time.Sync(2, 2))
    assert ours.more_us == 0 == replace(row, sync=None).more_us
    assert replace(row, sync=published_time.Sync(1, 1)).more_us == -_H100.barrier
    assert replace(row, sync=published_time.Sync(2, 2, answers=2)).more_us == pytest.approx(2 * _H100.hop)
    assert -_H100.barrier < replace(row, sync=published_time.Sync(2, 1)).more_us < 0
    assert replace(row, sync=published_time.Sync(2, 2, copies=2)).more_us > 2
    assert 0 < replace(row, sync=published_time.Sync(2, 2, staged=2)).more_us < 1
