"""An all_reduce in two levels: exact, of equal bits, and named faults, with real processes of made-up nodes."""

import os
import signal
import time
from dataclasses import replace
from functools import partial

import pytest

from tests import ranks
from tests.core.levels import captured_bodies
from tests.core.levels import level_bodies as bodies
from tests.marks import some
from tricomm.kernels.dtypes import DTYPES
from tricomm.topology import presets

FEW = ["bfloat16", "int8", "complex64"]


@pytest.mark.parametrize(
    ("world_size", "fake", "names"),
    [
        (4, False, FEW),
        (6, False, ["bool"]),
        (4, True, ["float32"]),
        *some([(4, False, list(DTYPES))], lambda *_: False),
    ],
    ids=["gloo", "three a node", "nccl", "all"],
)
def test_every_type_and_operation(world_size, fake, names, url):
    result = ranks.run(world_size, bodies.all_kinds, url, world_size // 2, fake, names, timeout=240)
    for wrong, bits, said, stats in result:
        assert wrong == []
        assert bits == result[0][1]
        assert [s[:3] for s in said] == [("two_level", "shards", "two_level"), ("two_level", "leaders", "two_level")]
        across = "nccl" if fake else "gloo"
        assert f"kernels inside 2 nodes of {world_size // 2} ranks, {across} across, by shards" in said[0][3]
        assert set(stats["kernels"]) == {"all_reduce"}


WORDS = {  # of each fault: its error, and what every rank that is in the call says
    "inside": ("CollectiveMismatch", ["count=500", "count=501", "rank 0", "rank 1"]),
    "between": ("CollectiveMismatch", ["count=500", "count=501"]),
    "other collective": ("CollectiveMismatch", ["all_reduce(", "broadcast(", "rank 0", "rank 1"]),
    "rank late": ("CollectiveTimeout", ["timeout after 2 s", "3"]),
    "node late": ("CollectiveTimeout", ["timeout after 2 s", "node 1 (rank(s) 2, 3)"]),
    "interrupt": ("GroupAborted", ["rank 2 was stopped by KeyboardInterrupt"]),
}


@pytest.mark.parametrize(
    ("fake", "names"),
    [(False, ["between", "rank late", "interrupt"]), (True, ["inside", "between", "other collective", "node late"])],
    ids=["gloo", "nccl"],
)
def test_faults_are_named_on_all_ranks_of_all_nodes(fake, names, url):
    for rank, (result, threads) in enumerate(ranks.run(4, bodies.faults, url, fake, names, timeout=200)):
        assert threads == []
        for name, (kind, text, seconds) in result.items():
            late = {"rank late": [3], "node late": [2, 3]}.get(name, [])
            if rank in late:
                assert kind == "nothing"
                continue
            wanted, words = WORDS[name]
            assert kind == wanted and all(word in text for word in words), (name, rank, kind, text)
            assert seconds < (3.0 if late else 1.5) + ranks.BUSY


def hurt(url, victims, fake, how, body=bodies.hurt, **options):
    """The outcomes of the other ranks, and the seconds that each took to see it."""
    with ranks.start(4, partial(body, **options), url, fake, victims) as started:
        pids = started.messages()
        time.sleep(0.3)
        began = time.monotonic()
        for rank in victims:
            os.kill(pids[rank], how)
        others = [rank for rank in range(4) if rank not in victims]
        result = started.results(of=others)
    assert all(result[rank].error is None for rank in others), result
    return [(*result[rank].value[:2], result[rank].value[2] - began) for rank in others]


@pytest.mark.parametrize("fake", [False, True], ids=["gloo", "nccl"])
def test_a_death_is_named_on_all_nodes(fake, url):
    for kind, text, seconds in hurt(url, [3], fake, signal.SIGKILL):
        assert kind == "PeerDied" and "rank 3, of node 1 (rank(s) 2, 3)" in text and "died" in text
        assert seconds < 2.0 + ranks.BUSY


def test_without_the_bridge_another_node_waits_until_its_time_is_up(url):
    result = hurt(url, [3], True, signal.SIGKILL, bodies.unbridged, timeout=4.0)
    assert all(kind == "CollectiveTimeout" and seconds > 2.5 for kind, _, seconds in result[:2])


@pytest.mark.parametrize("without", some([True, False], 2))
def test_without_the_comparison_nodes_take_each_others_calls_for_their_own(without, url):
    wanted = "nothing" if without else "CollectiveMismatch"
    assert [kind for kind, *_ in ranks.run(4, bodies.unprotected, url, without)] == [wanted] * 4


def test_a_rank_that_is_stopped_is_named_on_all_nodes(url):
    for kind, text, seconds in hurt(url, [2], False, signal.SIGSTOP, stall_timeout=1.0):
        assert kind == "PeerStalled" and "rank 2, of node 1" in text and seconds < 2.5 + ranks.BUSY


def test_a_node_whose_connections_close_is_named(url):
    for kind, text, seconds in hurt(url, [2, 3], False, signal.SIGKILL):
        assert kind == "PeerDied" and "node 1 (rank(s) 2, 3) closed its connections" in text
        assert seconds < 3.0 + ranks.BUSY


def test_a_node_that_is_silent_is_named(url):
    for kind, text, seconds in hurt(url, [2, 3], True, signal.SIGSTOP, stall_timeout=1.5):
        assert kind == "PeerStalled" and "node 1 (rank(s) 2, 3) shows no sign of life" in text
        assert seconds < 3.0 + ranks.BUSY


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("uneven", "the nodes have other numbers of ranks: 1, 2"),
        ("off", "Options(two_level=False)"),
        ("memory", "memory inside each of the nodes: rank 2: "),
    ],
)
def test_without_two_levels_all_ranks_go_to_nccl_and_say_why(case, why, url):
    for said in ranks.run(4, bodies.refused, url, case)[: 3 if case == "uneven" else 4]:
        done, forced, reason, value = said
        assert "there are no two levels here" in forced and why in forced
        assert f"the group spans 2 nodes; not in two levels: {why}" in reason
        assert value == (3.0 if case == "uneven" else 4.0)


def test_a_batch_invariant_group_refuses_them_by_name(url):
    for done, forced, reason, value in ranks.run(4, bodies.refused, url, "invariant"):
        assert "refused in a batch-invariant group" in done and "do not reduce in rank order" in forced
        assert "inside a node" in reason and value == 1.0


def test_bad_requests_are_refused_and_cost_nothing(url):
    words = ["there is no two_level/ll; there is two_level/shards, two_level/leaders", "a kernel is forced"]
    words += ["may not fit into int8", "no kernel takes torch.uint16", "only all_reduce has them", "spans 2 nodes"]
    words += ["barrier: the group spans 2 nodes", "symmetric: the group spans 2 nodes", "register: the group spans 2"]
    words += ["memory that the group shares: the group spans 2 nodes", "all ranks of this group share one memory"]
    for said in ranks.run(4, bodies.bad_requests, url):
        assert len(said) == len(words) and all(word in text for word, text in zip(words, said, strict=True)), said


@pytest.mark.parametrize("how", some(["bridged pairs", "said by the file"], 2))
def test_islands_on_one_node(how, url, tmp_path):
    topology = presets.pairs(4) if how == "bridged pairs" else replace(presets.pcie(4), islands=(7, 7, 9, 9))
    file = tmp_path / "topology.json"
    file.write_text(topology.dumps())
    for wrong, (by_table, forced), (kind, text, seconds) in ranks.run(4, bodies.islands, url, str(file)):
        assert wrong == []
        assert by_table[0] == "kernels" and forced[0] == "two_level"
        assert "kernels inside 2 islands of 2 ranks, kernels across" in forced[1]
        assert kind == "CollectiveMismatch" and "300" in text and "301" in text and seconds < 1.0 + ranks.BUSY


@pytest.mark.parametrize("forms", some([["shards"], ["leaders"]], lambda *_: False), ids=str)
def test_a_graph_holds_both_levels(forms, url):
    """The kernels and NCCL's call are captured, and a replay reads what the tensors hold then."""
    for rank, (_, result) in enumerate(ranks.run(4, captured_bodies.captured, url, forms, timeout=300)):
        for form, (untouched, results, steps) in result.items():
            assert untouched == 0.0 and results == [[10.0], [100.0]]
            assert steps == (3 if form == "shards" or rank % 2 == 0 else 2)
