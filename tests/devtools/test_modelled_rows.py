"""The table rows that are chosen from modelled times."""

import random

import pytest
from click.testing import CliRunner

from devtools import modelled_rows
from devtools.modelled_rows import GROUPS, chosen_by, fastest, lacks, table_rows, worst
from tricomm.explorer.timing import from_code

LL, WIDE, PLAIN, SWITCH = ("one_shot", "ll"), ("one_shot", "ll128"), ("two_shot", "simple"), ("multicast", "simple")
TIMES = {
    1: {LL: 4.0, WIDE: 3.95, PLAIN: 9.0, SWITCH: 9.0},
    2: {LL: 5.0, WIDE: 4.5, PLAIN: 9.0, SWITCH: 9.0},
    4: {LL: 9.5, WIDE: 6.0, PLAIN: 9.3, SWITCH: 8.0},
    8: {LL: 30.0, WIDE: 20.0, PLAIN: 12.0, SWITCH: 10.0},
}


def test_a_size_has_the_fastest_kernel_that_a_group_has():
    rows = table_rows(fastest(TIMES))
    assert [chosen_by(rows, n, "") for n in TIMES] == [
        LL,
        WIDE,
        WIDE,
        SWITCH,
    ]  # a gain of 1.3 % is not enough for wide words
    assert [chosen_by(rows, n, "wide") for n in TIMES] == [LL, LL, SWITCH, SWITCH]
    assert [chosen_by(rows, n, "switch") for n in TIMES] == [LL, WIDE, WIDE, PLAIN]
    # At 4, LL is only 2 % slower than PLAIN, so its row is extended.
    assert [chosen_by(rows, n, "wide switch") for n in TIMES] == [LL, LL, LL, PLAIN]
    assert worst(TIMES, rows) == pytest.approx(9.5 / 9.3 - 1)


def test_a_group_takes_the_first_row_that_it_can_run():
    """The group without wide words wants the switch, but PLAIN, which the other groups want, comes first."""
    wanted = {(n, missing): SWITCH if missing == "wide" else PLAIN for n in TIMES for missing in GROUPS}
    assert table_rows(wanted) == [(None, PLAIN)]


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
