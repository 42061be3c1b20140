"""The model of two levels: what it says of sizes, forms and machines, beside the shipped table."""

import json

import pytest
from click.testing import CliRunner

from tricomm.cli import cli
from tricomm.errors import InvalidArgument
from tricomm.perf.cost_model import kernel_time, two_level

H100 = kernel_time.find("h100")


def test_published_times_of_nccl_are_met_and_nothing_is_made_up():
    for nbytes, time in two_level._NCCL:
        assert two_level.nccl(H100, 8, 4, nbytes).time_us == pytest.approx(time)
    assert two_level.nccl(H100, 8, 4, 1 << 30) is None and two_level.nccl(H100, 8, 2, 8192) is None
    with pytest.raises(InvalidArgument, match="network cards are not known"):
        two_level.predict(kernel_time.find("pcie4"), 8, 2, 8192, "shards")


def test_shards_are_never_slower_and_the_tables_range_is_faster_than_nccl():
    for nbytes in (8 << 10, 64 << 10, 1 << 20, 4 << 20):
        shards, leaders = (two_level.predict(H100, 8, 4, nbytes, form) for form in ("shards", "leaders"))
        assert shards.time_us < leaders.time_us and shards.time_us < two_level.nccl(H100, 8, 4, nbytes).time_us
        assert shards.by_table == (64 << 10 <= nbytes <= 4 << 20)


def test_the_command():
    asked = ["predict", "--nodes", "4", "--sizes", "8K,1M"]
    text = CliRunner().invoke(cli, asked).output
    assert "4 nodes of 8 x h100" in text and "two_level/shards" in text and "not measured" in text
    said = json.loads(CliRunner().invoke(cli, [*asked, "--json"]).output)
    assert said["predicted"] and {row["way"] for row in said["results"]} == {
        "two_level/shards", "two_level/leaders", "nccl",
    }  # fmt: skip
    assert "nccl" not in said["left_out"]


def test_what_is_left_out_is_named():
    text = CliRunner().invoke(cli, ["predict", "--nodes", "2", "--gpu", "a100", "--sizes", "8K"]).output
    assert "left out: nccl: its times are published for 4 nodes of 8 h100" in text
    assert (
        "left out: reduce_scatter_multicast_simple, all_gather_multicast_simple, broadcast_multicast_simple: " in text
    )


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (["--collective", "all_reduce_rms_norm"], "all_reduce_rms_norm is fused inside a node"),
        (["--quantize", "fp8"], "all_reduce_rms_norm is fused inside a node"),
        (["--collective", "all"], "--collective all: only all_reduce"),
        (["--from-code"], "from bytes and hops"),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(asked, words):
    result = CliRunner().invoke(cli, ["predict", "--nodes", "2", *asked])
    assert result.exit_code == 2 and words in " ".join(result.output.replace("│", " ").split())
