"""The links of a topology: active ones between GPUs, through visible or invisible switches, in a working fabric."""

from typing import Any
from uuid import UUID

import pytest

from tests.topology import fake_nvml, shapes
from tests.topology.fake_nvml import Card, FakeCuda, FakeNvml, Link, bus_id, known, look, meshed, switched, uuid_of
from tricomm.topology import discovery

DGX1V = shapes.dgx1v()


def test_links_that_are_down_or_unfit_do_not_count() -> None:
    fake = FakeNvml(meshed(((0, 4), (4, 0))))
    for card in fake.cards.values():
        card.links[0].active = card.links[2].can_peer = card.links[1].there = False
    assert known(look(fake, [0, 1])).links == ((0, 1), (1, 0))


def test_a_link_that_only_one_end_sees() -> None:
    fake = FakeNvml(meshed(((0, 2), (2, 0))))
    fake.cards[1].links[0].active = False
    result = look(fake, [0, 1])
    assert known(result).links == ((0, 1), (1, 0))
    assert result.notes == ("devices 0 and 1 see 2 and 1 links to each other; the fewer count",)


def test_links_to_other_devices_do_not_count() -> None:
    """Links to a CPU (IBM), to the card itself, to an invisible card, and to a GPU of which NVML gives no address."""
    ends = [Link(bus_id(0)), Link("00000004:04:00.0", fake_nvml.NPU), Link(bus_id(9)), Link("", fake_nvml.GPU)]
    fake = FakeNvml([Card(0, [*ends, Link(bus_id(1))]), Card(1, [*ends[1:], Link(bus_id(0))])])
    fake.classes = {"0000:13:00.0": 0x0302}
    assert known(look(fake, [0, 1])).links == ((0, 1), (1, 0))


@pytest.mark.parametrize("count", [2, 8, 16])
def test_switches(count: int) -> None:
    result = look(FakeNvml(switched(count)), list(range(count)))
    assert known(result).canonical == shapes.nvswitch(count).canonical and result.notes == ()


def test_a_pair_has_the_lower_of_its_numbers_of_links_through_switches() -> None:
    cards = switched(3)
    del cards[1].links[12:]
    topology = known(look(FakeNvml(cards), [0, 1, 2]))
    assert topology.links == ((0, 12, 18), (12, 0, 12), (18, 12, 0)) and topology.kind == "nvswitch"


def test_a_card_without_links_among_switched_ones() -> None:
    topology = known(look(FakeNvml([*switched(2), Card(2)]), [0, 1, 2]))
    assert topology.links == ((0, 18, 0), (18, 0, 0), (0, 0, 0)) and topology.kind == "partial"


def test_one_card_of_a_switched_box() -> None:
    assert known(look(FakeNvml(switched(8)), [3])).canonical == shapes.pcie(1).canonical


def test_an_old_driver_that_cannot_name_the_ends() -> None:
    """R450, as on DGX-1 and DGX-2: cards are recognised by address, switches by their class in /sys."""
    missing = ("device_get_nvlink_remote_device_type", "device_get_gpu_fabric_info_v", "device_get_p2p_status")
    mesh = FakeNvml(meshed(DGX1V.links), missing)
    assert known(look(mesh, [4, 1, 0, 5])).links == DGX1V.of([4, 1, 0, 5]).links
    fake = FakeNvml(switched(4, 6), missing)
    fake.classes = {f"0000:c{i}:00.0": 0x0680 for i in range(4)}
    assert known(look(fake, [0, 1, 2, 3])).canonical == shapes.nvswitch(4, 6).canonical


@pytest.mark.parametrize("missing", [(), ("device_get_nvlink_remote_device_type",)])
@pytest.mark.parametrize("where", ["00000000:C{}:00.0", "ffffffff:ffff:ff", ""])
def test_invisible_switches_count_if_nvml_confirms_the_pair(missing: tuple[str, ...], where: str) -> None:
    fake = FakeNvml(switched(4, kind=fake_nvml.UNKNOWN, where=where), missing)
    fake.forbidden = {frozenset({0, 2})}
    result = look(fake, [0, 1, 2])
    assert known(result).links == ((0, 18, 0), (18, 0, 18), (0, 18, 0))
    assert result.notes == ("devices 0 and 2: linked, but NVML forbids peer access over NVLink",)
    fake.silent = True
    assert known(look(fake, [0, 1, 2])).kind == "pcie"


def test_a_mig_instance_is_not_at_links_without_a_known_end() -> None:
    cards = switched(3, kind=fake_nvml.UNKNOWN, where="")
    cards[1].mig = True
    result = look(FakeNvml(cards), [0, 1, 2])
    assert known(result).links == ((0, 0, 18), (0, 0, 0), (18, 0, 0))
    assert len(result.notes) == 1 and "MIG" in result.notes[0]


def test_links_to_cards_of_the_group_are_not_links_to_switches() -> None:
    """An old driver does not name the ends of links, but confirms every pair."""
    fake = FakeNvml(meshed(((0, 1, 0), (1, 0, 1), (0, 1, 0))), ("device_get_nvlink_remote_device_type",))
    assert known(look(fake, [0, 1, 2])).links == ((0, 1, 0), (1, 0, 1), (0, 1, 0))


def test_links_both_ways_are_added_up_but_the_box_is_not_switched() -> None:
    cards = meshed(((0, 2), (2, 0)))
    for card, more in zip(cards, switched(2, 4), strict=True):
        card.links += more.links
    topology = known(look(FakeNvml(cards), [0, 1]))
    assert topology.links == ((0, 6), (6, 0)) and topology.kind == "fully_connected"


def test_linked_cards_with_invisible_ends_are_not_switched() -> None:
    cards = meshed(((0, 2), (2, 0)))
    for card in cards:
        card.links.append(Link("0000ffff:ff:00.0", fake_nvml.UNKNOWN))
    assert known(look(FakeNvml(cards), [0, 1])).links == ((0, 2), (2, 0))


def test_links_that_peers_cannot_use_do_not_count() -> None:
    """As in a VM whose GPUs may not reach each other over their links."""
    for one_way in ((0, 1), (1, 0)):
        fake = FakeNvml(switched(2))
        fake.forbidden = {one_way}
        result = look(fake, [1, 0])
        assert known(result).kind == "pcie" and "forbids" in result.notes[0]


CLUSTER, OTHER = b"\x01" * 16, b"\x02" * 16


@pytest.mark.parametrize(
    ("states", "kind", "note"),
    [
        ([(3, 0, CLUSTER, 7), (3, 0, CLUSTER, 7)], "nvswitch", None),
        ([(3, 0, CLUSTER, 7), None], "nvswitch", None),
        ([(0, 0, CLUSTER, 7), (0, 0, CLUSTER, 8)], "nvswitch", None),
        ([(3, 0, CLUSTER, 7), (3, 0, CLUSTER, 8)], "pcie", None),
        ([(3, 0, CLUSTER, 7), (3, 0, OTHER, 7)], "pcie", None),
        ([(3, 0, CLUSTER, 7), (2, 0, CLUSTER, 7)], "pcie", "device 1: NVSwitch fabric in progress; look at nvidia-f"),
        ([(1, 0, CLUSTER, 7), (3, 0, CLUSTER, 7)], "pcie", "device 0: NVSwitch fabric not started"),
        ([(3, 0, CLUSTER, 7), (3, 999, CLUSTER, 7)], "pcie", "failed with NVML's error 999"),
        ([(3, 0, CLUSTER, 7), (9, 0, CLUSTER, 7)], "pcie", "fabric state 9"),
        ([(1, 0, CLUSTER, 7), (1, 0, CLUSTER, 7)], "pcie", "device 0, 1: NVSwitch fabric not started"),
    ],
)
def test_switches_join_the_gpus_in_one_clique_of_a_working_fabric(
    states: list[Any], kind: str, note: str | None
) -> None:
    cards = switched(2)
    for card, state in zip(cards, states, strict=True):
        card.fabric = state
    result = look(FakeNvml(cards), [0, 1])
    assert known(result).kind == kind
    assert (note or "") in "".join(result.notes) and bool(result.notes) == (note is not None)


def test_the_fabric_in_words_per_rank() -> None:
    cards = switched(3)
    cards[1].fabric = cards[2].fabric = (3, 0, CLUSTER, 7)
    uuids = [uuid_of(number) for number in (1, 0, 1)]
    result = discovery.of_devices(uuids, FakeCuda([0, 1]), FakeNvml(cards).nvml())
    words = f"completed, cluster {UUID(bytes=CLUSTER)}, clique 7"
    assert result.fabric == (words, "not told", words)


def test_direct_links_need_no_fabric() -> None:
    cards = meshed(((0, 4), (4, 0)))
    cards[0].fabric = (1, 0, CLUSTER, 0)
    assert known(look(FakeNvml(cards), [0, 1])).kind == "fully_connected"
