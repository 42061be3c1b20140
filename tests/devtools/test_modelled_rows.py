"""The rows of a table that modelled times give."""

from __future__ import annotations

import random

import pytest
from click.testing import CliRunner

from devtools import modelled_rows
from devtools.modelled_rows import GROUPS, chosen_by, fastest, lacks, table_rows
from tricomm.explorer.timing import from_code
from tricomm.policy import selection

LL, WIDE, PLAIN, SWITCH = ("one_shot", "ll"), ("one_shot", "ll128"), ("two_shot", "simple"), ("multicast", "simple")


@pytest.mark.parametrize("seed", range(20))
def test_rows_choose_as_they_should_and_none_can_be_left_out(seed):
    draw = random.Random(seed)
    times = {1 << n: {f: draw.uniform(1, 3) for f in (LL, WIDE, PLAIN, SWITCH)} for n in range(6)}
    wanted = fastest(times)
    rows = table_rows(wanted)
    assert all(chosen_by(rows, n, missing) == family for (n, missing), family in wanted.items())
    assert not any(lacks(wanted[n, missing], missing) for n in times for missing in GROUPS)
    for number in range(len(rows)):
        fewer = rows[:number] + rows[number + 1 :]
        assert any(chosen_by(fewer, n, missing) != family for (n, missing), family in wanted.items())
    chosen = [chosen_by(rows, n, "") for n in times]
    runs = [family for family, before in zip(chosen, [None, *chosen], strict=False) if family != before]
    assert len(set(runs)) == len(runs)
    for (size, before), (more, after) in zip(
        zip(times, chosen, strict=True), [*zip(times, chosen, strict=True)][1:], strict=False
    ):
        assert before == after or times[more][before] >= 1.03 * times[more][after], (size, more)


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather"])
@pytest.mark.parametrize("world_size", [4, 8])
@pytest.mark.parametrize("name", ["hopper", "ampere"])
def test_a_shipped_table_takes_no_kernel_again_after_another_one(name, world_size, collective):
    (table,) = (table for table in selection.shipped_tables() if table.name == name)
    rows = [
        (row.max_bytes, (row.algorithm, row.protocol))
        for row in table.rows
        if (row.collective, row.world_size, row.zero_copy) == (collective, world_size, False)
    ]
    for missing in GROUPS:
        chosen = [chosen_by(rows, nbytes, missing) for nbytes in modelled_rows.SIZES]
        runs = [family for family, before in zip(chosen, [None, *chosen], strict=False) if family != before]
        assert len(set(runs)) == len(runs), (missing, runs)


def test_rows_are_printed_as_tables_have_them(monkeypatch):
    asked = []

    def predict(machine, kernel, world_size, nbytes):
        asked.append((machine.name, world_size, nbytes))
        time = nbytes / 1024 * (1 if kernel.protocol == "simple" else 2) + (9 if kernel.protocol == "simple" else 0)
        return type("Time", (), {"time_us": time})

    monkeypatch.setattr(from_code, "predict", predict)
    result = CliRunner().invoke(modelled_rows.main, ["--gpu", "a100", "--world-sizes", "3", "--collective", "gather"])
    assert result.exit_code == 0 and set(asked) == {("a100", 3, n) for n in modelled_rows.SIZES}
    assert result.stdout.splitlines() == [
        "# modelled from the compiled code, not measured; a100",
        "# gather, 3 ranks: at most 0.0% slower than the fastest",
        '{"collective": "gather", "world_size": 3, "max_bytes": 8192, "algorithm": "one_shot", "protocol": "ll"},',
        '{"collective": "gather", "world_size": 3, "max_bytes": null, "algorithm": "one_shot", "protocol": "simple"},',
    ]
    refused = CliRunner().invoke(modelled_rows.main, ["--world-sizes", "1"])
    assert refused.exit_code == 2 and "world size" in refused.stderr
