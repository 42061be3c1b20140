"""A removed name is refused with its replacement, in options, calls, tables, topologies and commands."""

import json
import os
import subprocess
import sys

import pytest
import torch

import tricomm
from tests import forked
from tests.topology import shapes
from tricomm import gone
from tricomm.errors import InvalidArgument
from tricomm.options import Options
from tricomm.policy.tuning_tables import TableRow
from tricomm.topology.model import Topology


@pytest.mark.parametrize(
    ("option", "instead"),
    [
        ("two_level", "leave it out"),
        ("channels", "leave it out"),
        ("max_registers", r"Options\(beside_compute=True\)"),
        ("blocks", "max_blocks"),
        ("tile", "a table"),
        ("first_epoch", "leave it out"),
    ],
)
def test_options(option, instead):
    with pytest.raises(InvalidArgument, match=rf"Options\({option}\) is gone: {instead}"):
        Options(**{option: 1})
    with pytest.raises(TypeError, match="two_levels"):  # there never was one of that name
        Options(two_levels=1)


def test_an_algorithm_of_a_call_and_of_a_tuned_row():
    def body(comm):
        for call in (
            lambda: comm.all_reduce(torch.ones(3), algorithm="two_level"),
            lambda: comm.explain("all_reduce", 64, algorithm="two_level"),
        ):
            with pytest.raises(InvalidArgument, match="algorithm='two_level' is gone: leave the algorithm open"):
                call()
        comm.all_reduce(x := torch.ones(3))
        return x.tolist()

    assert tricomm.simulate(body, world_size=2) == [[2.0] * 3] * 2
    with pytest.raises(InvalidArgument, match="algorithm='two_level' is gone"):
        TableRow("all_reduce", 8, None, "two_level", "shards")


def test_a_field_of_a_topology():
    text = json.dumps({**json.loads(shapes.pcie(2).dumps()), "islands": [0, 1]})
    with pytest.raises(InvalidArgument, match="islands of a topology is gone: leave the field out"):
        Topology.loads(text)


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["predict", "--nodes", "4"], "tricomm predict --nodes is gone: leave it out"),
        (["predict", "--nodes=4"], "tricomm predict --nodes is gone: leave it out"),
        (["tune", "export", "table.json"], "tricomm tune export is gone: `tricomm tune show` prints the tables"),
        (["evidence", "verify", "evidence.zip"], "tricomm evidence is gone: `make gpu-evidence` writes"),
    ],
)
def test_the_command_line(words, answer):
    environment = {**os.environ, "PYTHONPATH": forked.python_path()}
    command = [sys.executable, "-m", "tricomm", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and answer in done.stderr, done.stderr


def test_other_command_lines_are_unaffected():
    assert gone.command(["predict", "--node", "4"]) == gone.command(["bench", "--nodes"]) == ""
