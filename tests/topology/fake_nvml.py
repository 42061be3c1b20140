"""A fake of `cuda.bindings.nvml` on a machine that is a list of cards; it enforces NVML's rules.

Rules: nothing before `init_v2` or after the last `shutdown`; handles are of one initialisation only; calls on links ask
for links that the card has; MIG instances have none. A call that NVML answers with an error raises it; a call that a
program must not make is also recorded, and `verify` fails for it even if the error was swallowed.
"""

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from uuid import UUID

from tricomm.topology import discovery
from tricomm.topology.discovery import Discovery
from tricomm.topology.model import Topology
from tricomm.topology.nvml import Nvml

ACTIVE, GPU, NPU, SWITCH, UNKNOWN = 1, 0, 1, 2, 255


def uuid_of(number: int) -> bytes:
    """As in `fake_bindings`, so that its CUDA and this NVML describe one machine."""
    return hashlib.md5(b"gpu%d" % number).digest()


class NvmlError(Exception):
    pass


class NotSupportedError(NvmlError):
    pass


class InvalidArgumentError(NvmlError):
    pass


class NotFoundError(NvmlError):
    pass


class UninitializedError(NvmlError):
    pass


class GpuIsLostError(NvmlError):
    pass


class FunctionNotFoundError(RuntimeError):
    """The driver's library lacks the function; not an NvmlError."""


@dataclass
class Link:
    """One link slot of a card, and what is at its far end. Asking for one that is not `there` is an error."""

    bus_id: str
    kind: int = GPU
    active: bool = True
    can_peer: bool = True
    there: bool = True


@dataclass
class Card:
    number: int
    links: list[Link] = field(default_factory=list)
    mig: bool = False  # split into MIG instances
    instance: bool = False  # is a MIG instance
    fabric: tuple[int, int, bytes, int] | None = None  # state, status, cluster, clique
    name: str = "Fake V100"

    @property
    def bus_id(self) -> str:
        return bus_id(self.number)


def bus_id(number: int) -> str:
    """As NVML writes it: 8 digits of domain, capital letters."""
    return f"00000000:{10 + number:02X}:00.0"


class FakeNvml:
    """The module. `numbers`: cards in PCI order; `missing`: functions that this driver does not have."""

    NotSupportedError, InvalidArgumentError, NotFoundError = NotSupportedError, InvalidArgumentError, NotFoundError
    NVLINK_MAX_LINKS = 18

    def __init__(self, cards: list[Card], missing: tuple[str, ...] = ()) -> None:
        self.cards = {card.number: card for card in cards}
        self.missing = missing
        self.forbidden: set[frozenset[int] | tuple[int, int]] = set()  # pairs without peer access over NVLink
        self.silent = False  # no answers on peer access
        self.unreachable: set[frozenset[int]] = set()
        self.failures: dict[tuple[str, int], type[Exception]] = {}  # by function and card
        self.classes: dict[str, int] = {}  # /sys, by PCI address
        self.calls: Counter[str] = Counter()
        self.complaints: list[str] = []
        self._open = self._generation = 0

    def nvml(self) -> Nvml:
        return Nvml(self, self.classes.get)

    def verify(self) -> None:
        assert not self.complaints, self.complaints
        assert self._open == 0, f"{self._open} sessions are still open"

    def __getattribute__(self, name: str) -> Any:
        if name.startswith(("device_", "init_", "shutdown")):
            if name in self.missing:
                raise FunctionNotFoundError(f"function {name} is not found")
            self.calls[name] += 1
        return object.__getattribute__(self, name)

    def init_v2(self) -> None:
        if ("init_v2", 0) in self.failures:
            raise self.failures["init_v2", 0]("Driver Not Loaded")
        self._generation += not self._open
        self._open += 1

    def shutdown(self) -> None:
        if not self._open:
            raise self._complain("shutdown without init")
        self._open -= 1

    def device_get_count_v2(self) -> int:
        if not self._open:
            raise self._complain("a count without init")
        return len(self.cards)

    def device_get_handle_by_index_v2(self, index: int) -> int:
        if not self._open:
            raise self._complain("a handle without init")
        return self._generation * 1000 + list(self.cards)[index]

    def device_get_handle_by_uuid(self, uuid: str) -> int:
        if not self._open:
            raise self._complain("a handle without init")
        for card in self.cards.values():
            if uuid == f"{'MIG' if card.instance else 'GPU'}-{UUID(bytes=uuid_of(card.number))}":
                return self._generation * 1000 + card.number
        raise NotFoundError("Not Found")

    def device_get_name(self, device: int) -> str:
        return self._card("device_get_name", device).name

    def device_get_mig_mode(self, device: int) -> tuple[int, int]:
        card = self._card("device_get_mig_mode", device)
        if card.instance:
            raise InvalidArgumentError("Invalid Argument")
        return int(card.mig), int(card.mig)

    def device_is_mig_device_handle(self, device: int) -> int:
        return int(self._card("device_is_mig_device_handle", device).instance)

    def device_get_pci_info_v3(self, device: int) -> Any:
        return SimpleNamespace(bus_id=self._card("device_get_pci_info_v3", device).bus_id)

    def device_get_nvlink_capability(self, device: int, link: int, capability: int) -> int:
        card = self._card("device_get_nvlink_capability", device)
        assert capability == 0
        if not card.links:
            raise NotSupportedError("Not Supported")
        # Like NVML, it answers for links that the card does not have.
        return int(card.links[link].can_peer) if link < len(card.links) else 1

    def device_get_nvlink_state(self, device: int, link: int) -> int:
        return ACTIVE if self._link("device_get_nvlink_state", device, link).active else 0

    def device_get_nvlink_remote_device_type(self, device: int, link: int) -> int:
        return self._link("device_get_nvlink_remote_device_type", device, link).kind

    def device_get_nvlink_remote_pci_info_v2(self, device: int, link: int) -> Any:
        return SimpleNamespace(bus_id=self._link("device_get_nvlink_remote_pci_info_v2", device, link).bus_id)

    def device_get_p2p_status(self, device: int, peer: int, index: int) -> int:
        card, other = (self._card("device_get_p2p_status", each) for each in (device, peer))
        if card is other:
            raise self._complain("the status of a card and itself")
        pair, one_way = frozenset({card.number, other.number}), (card.number, other.number)
        if self.silent or card.instance or other.instance:
            raise NotSupportedError("Not Supported")
        if index == 2:
            return 5 if {pair, one_way} & self.forbidden else 0
        assert index in (0, 1)
        return 5 if pair in self.unreachable else 0

    def device_get_gpu_fabric_info_v(self, device: int) -> Any:
        card = self._card("device_get_gpu_fabric_info_v", device)
        if card.fabric is None:
            raise NotSupportedError("Not Supported")
        state, status, cluster, clique = card.fabric
        return SimpleNamespace(state=state, status=status, cluster_uuid=list(cluster), clique_id=clique)

    def _card(self, call: str, device: int) -> Card:
        if not self._open:
            raise self._complain(f"{call} without init")
        generation, number = divmod(device, 1000)
        if generation != self._generation or number not in self.cards:
            raise self._complain(f"{call} of a handle that is not of this initialisation")
        if (call, number) in self.failures:
            raise self.failures[call, number](call)
        return self.cards[number]

    def _link(self, call: str, device: int, link: int) -> Link:
        card = self._card(call, device)
        if card.instance:
            raise self._complain(f"{call} of a MIG instance")
        if link >= len(card.links) or not card.links[link].there:
            raise InvalidArgumentError("Invalid Argument")
        if "remote" in call and not card.links[link].active:
            raise self._complain(f"{call} of a link that is down")
        return card.links[link]

    def _complain(self, text: str) -> NvmlError:
        self.complaints.append(text)
        return UninitializedError(text)


class FakeCuda:
    """CUDA with CUDA_VISIBLE_DEVICES=`visible`, numbers of cards; `reach`: its answers on peer access."""

    def __init__(self, visible: list[int], unreachable: set[frozenset[int]] | None = None) -> None:
        self.visible, self.unreachable = visible, unreachable or set()

    def device_count(self) -> int:
        return len(self.visible)

    def device_uuid(self, ordinal: int) -> bytes:
        return uuid_of(self.visible[ordinal])

    def can_access_peer(self, ordinal: int, peer_ordinal: int) -> bool:
        assert ordinal != peer_ordinal
        return frozenset({self.visible[ordinal], self.visible[peer_ordinal]}) not in self.unreachable


def meshed(links: list[list[int]] | tuple[tuple[int, ...], ...]) -> list[Card]:
    """Cards joined directly, `links[i][j]` times; every other slot first, so that link numbers say nothing."""
    cards = []
    for number, row in enumerate(links):
        ends = [Link(bus_id(other)) for other, count in enumerate(row) for _ in range(count)]
        cards.append(Card(number, ends[1::2] + ends[::2]))
    return cards


def switched(count: int, links: int = 18, kind: int = SWITCH, where: str = "00000000:C{}:00.0") -> list[Card]:
    """Cards whose links all go to 4 switches."""
    return [Card(number, [Link(where.format(link % 4), kind) for link in range(links)]) for number in range(count)]


def look(fake: FakeNvml, visible: list[int], unreachable: set[frozenset[int]] | None = None) -> Discovery:
    result = discovery.read(FakeCuda(visible, unreachable), fake.nvml())
    fake.verify()
    return result


def known(result: Discovery) -> Topology:
    assert result.topology is not None and result.reason == "", result
    return result.topology
