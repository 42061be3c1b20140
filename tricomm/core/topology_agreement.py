"""The links between a group's devices, on which all ranks agree before any memory is shared."""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, NamedTuple
from uuid import UUID

import torch

from tricomm import env
from tricomm.cuda_bindings import load_bindings
from tricomm.errors import InvalidArgument, ResourceError
from tricomm.kernels import layout, wide_words
from tricomm.options import Options
from tricomm.store.control import ControlPage
from tricomm.topology import mesh
from tricomm.topology.model import Topology

if TYPE_CHECKING:  # a CPU has no links to ask NVML for
    from tricomm.topology.discovery import Discovery

log = logging.getLogger("tricomm")
_DEVICE = struct.Struct("<36s16sQ")  # UUID, architecture, processors
_NARROW = b"/narrow"
_PROGRAMMATIC_EDGES = 12030  # the first driver that captures dependent launches in graphs
Find = Callable[[tuple[bytes, ...]], "Discovery"]


@cache
def _found(uuids: tuple[bytes, ...]) -> Discovery:
    """Cached per process: it takes several hundred calls of NVML, and links do not change."""
    from tricomm.topology import discovery

    return discovery.of_devices(uuids)


def agree(
    control: ControlPage,
    options: Options,
    device: torch.device,
    timeout: float,
    find: Find = _found,
    uuid: bytes | None = None,
) -> Topology | None:
    """The topology of the group's devices, by rank; None if nothing is known, or if the ranks differ in it.

    Called by all ranks together. Tests replace `find` and `uuid`, which finds this rank's device. Raises
    `InvalidArgument` on all ranks if several are on one GPU and one of these has not allowed it.
    """
    check(options, control.world_size)
    if device.type != "cuda":
        return options.topology
    from tricomm.topology import discovery

    mine = uuid if uuid is not None else discovery.TorchCuda().device_uuid(device.index)
    may_share = options.share_device or env.share_device()
    answers = control.exchange(mine + bytes([may_share]), "device UUIDs", timeout)
    uuids = tuple(answer[:-1] for answer in answers)
    _refuse_shared(uuids, [answer[-1] > 0 for answer in answers])
    if options.topology is not None:
        return options.topology
    links = find(uuids)
    said = links.topology.canonical if links.topology is not None else f"unknown: {links.reason}"
    with suppress(InvalidArgument):  # it is raised on all ranks or on none
        control.require_equal(said, "topology", timeout)
        return links.topology
    log.warning("ranks find different links between their GPUs; rank %d: %s; none is relied on", control.rank, said)
    return None


def _refuse_shared(uuids: Sequence[bytes], may_share: Sequence[bool]) -> None:
    """Raises `InvalidArgument`, the same on all ranks, if ranks share a GPU and not all of them have allowed it."""
    for uuid in dict.fromkeys(uuids):
        ranks = [rank for rank, theirs in enumerate(uuids) if theirs == uuid]
        if len(ranks) > 1 and not all(may_share[rank] for rank in ranks):
            raise InvalidArgument(
                f"ranks {', '.join(map(str, ranks))} are on one GPU (UUID {UUID(bytes=uuid)}), and their kernels "
                "wait for each other in turns there; give each rank a GPU of its own (device=, LOCAL_RANK; "
                "CUDA_VISIBLE_DEVICES may hide some), or say on each of these ranks that it is meant: "
                "Options(share_device=True) or TRICOMM_SHARE_DEVICE=1"
            )


class DeviceFacts(NamedTuple):
    """The device on which a rank's kernels run: `architecture` is "cpu" or, for example, "sm_90". `dependent_launch`:
    whether device and driver support programmatic dependent launch, also in graphs."""

    uuid: str = "cpu"
    architecture: str = "cpu"
    processors: int = layout.MAX_BLOCKS
    dependent_launch: bool = False


def device_facts(device: torch.device) -> DeviceFacts:
    """The facts of `device`, which is the CPU or one of this machine's GPUs."""
    if device.type != "cuda":
        return DeviceFacts()
    facts = torch.cuda.get_device_properties(device)
    architecture = f"sm_{facts.major}{facts.minor}"
    dependent = facts.major >= 9 and _driver_version() >= _PROGRAMMATIC_EDGES
    return DeviceFacts(str(facts.uuid), architecture, facts.multi_processor_count, dependent)


def _driver_version() -> int:
    """The driver's version, such as 12030 for CUDA 12.3; 0 without usable bindings, as in a group whose calls NCCL
    runs."""
    try:
        result, version = load_bindings("driver").cuDriverGetVersion()
    except ResourceError:
        return 0
    return int(version) if result == 0 else 0


def agree_on_devices(
    control: ControlPage, facts: DeviceFacts, most_blocks: int | None, timeout: float
) -> tuple[str, int]:
    """The architecture of the ranks' devices, and the largest grid whose blocks are certainly resident together on
    each.

    Called by all ranks together, each with its own `facts`. The architecture is "cpu", for example "sm_90", or "cuda"
    if devices differ; the grid is at most `most_blocks`.
    """
    # A compiler without wide words counts as another architecture, so that all ranks know whether all support them.
    narrow = b"" if facts.architecture == "cpu" or wide_words.COMPILES.value else _NARROW
    mine = _DEVICE.pack(facts.uuid.encode()[:36], facts.architecture.encode() + narrow, facts.processors)
    answers = control.exchange(mine, "device facts", timeout)
    uuids, kinds, counts = zip(*(_DEVICE.unpack(answer) for answer in answers), strict=True)
    kind = kinds[0].rstrip(b"\0").removesuffix(_NARROW).decode() if len(set(kinds)) == 1 else "cuda"
    most = layout.MAX_BLOCKS
    if kind != "cpu":  # ranks that share a device share its processors
        most = max(1, min(count // uuids.count(uuid) for uuid, count in zip(uuids, counts, strict=True)))
    return kind, min(most, most_blocks or layout.MAX_BLOCKS)


def check(options: Options, world_size: int) -> None:
    """Raises `InvalidArgument` for a topology of another number of devices."""
    if options.topology is not None and len(options.topology) != world_size:
        raise InvalidArgument(
            f"Options.topology is of {len(options.topology)} devices, the group has {world_size} ranks; one device a "
            "rank is needed, as Topology.of(devices) gives"
        )


def places(topology: Topology | None, world_size: int) -> tuple[mesh.MeshPosition, ...] | None:
    """The ranks' positions in a hybrid cube mesh; with other or unknown links, the positions of a DGX-1V. None unless
    there are 8 ranks."""
    if world_size != mesh.RANKS:
        return None
    tables = mesh.positions(topology.links) if topology is not None else None
    return tables or mesh.positions(mesh.DGX1V_LINKS)


def group_table(
    rank: int, bases: Sequence[int], control: int, memory: layout.Layout, topology: Topology | None, first_epoch: int
) -> list[int]:
    """The words of the group table at the head of an arena: this rank's number, and all addresses.

    `bases` are the addresses of all ranks' arenas here, `control` is the address of the control page for the kernels.
    """
    values = [0] * (layout.HEADERS // 8)
    values[layout.RANK], values[layout.CONTROL] = rank, control
    values[layout.EPOCHS :] = [first_epoch] * layout.MAX_BLOCKS
    for word, value in memory.constants.items():
        values[word] = value
    values[layout.PEERS : layout.PEERS + len(bases)] = bases
    by_rank = places(topology, len(bases))
    if by_rank is not None:
        here = by_rank[rank]
        values[layout.QUAD : layout.QUAD + 4] = here.quad_by_position
        values[layout.PEER_QUAD : layout.PEER_QUAD + 4] = by_rank[here.relay].quad_by_position
        values[layout.POSITION], values[layout.QUAD_RANK] = here.position, here.order.index(rank)
    return values


def reach(topology: Topology | None, rank: int) -> tuple[bool, ...] | None:
    """For each rank, whether `rank` maps its memory, on a hybrid cube mesh whose ranks do not all reach each other;
    else None."""
    if topology is None or topology.all_peers or mesh.positions(topology.links) is None:
        return None
    return tuple(other == rank or links > 0 for other, links in enumerate(topology.links[rank]))
