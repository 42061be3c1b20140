"""How the devices of a group are linked, agreed by all of its ranks before any memory is shared."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from functools import cache
from uuid import UUID

import torch

from tricomm import cube_mesh, discovery, env
from tricomm.errors import InvalidArgument
from tricomm.options import Options
from tricomm.store.control import ControlPage
from tricomm.topology import Topology
from tricomm.topology_shapes import dgx1v

log = logging.getLogger("tricomm")
Find = Callable[[tuple[bytes, ...]], discovery.Discovery]


@cache
def _found(uuids: tuple[bytes, ...]) -> discovery.Discovery:
    """Asked once a process: it takes several hundred calls of NVML, and links do not change."""
    return discovery.of_devices(uuids)


def agree(
    control: ControlPage, options: Options, device: torch.device, timeout: float, find: Find = _found,
    uuid: bytes | None = None,
) -> Topology | None:  # fmt: skip
    """The topology of the group's devices, by rank; None where nothing is known, or ranks find different things.

    Called by all ranks together. `find` and `uuid` (of this rank's device) are the machine's, but in tests. Raises
    `InvalidArgument` on all ranks where several are on one GPU and one of these has not said that it may be so.
    """
    check(options, control.world_size)
    if device.type != "cuda":
        return options.topology
    mine = uuid if uuid is not None else discovery.TorchCuda().device_uuid(device.index)
    may_share = options.share_device or env.share_device()
    answers = control.exchange(mine + bytes([may_share]), "device UUIDs", timeout)
    uuids = tuple(answer[:-1] for answer in answers)
    _refuse_shared(uuids, [answer[-1] > 0 for answer in answers])
    if options.topology is not None:
        return options.topology
    found = find(uuids)
    said = found.topology.canonical if found.topology is not None else f"unknown: {found.reason}"
    digests = control.exchange(hashlib.sha256(said.encode()).digest(), "topology", timeout)
    if len(set(digests)) > 1:
        log.warning("ranks find different links between their GPUs; rank %d: %s; none is relied on", control.rank, said)
        return None
    return found.topology


def _refuse_shared(uuids: Sequence[bytes], may_share: Sequence[bool]) -> None:
    """The same on all ranks: raises `InvalidArgument` where ranks are on one GPU without all of them having said so."""
    for uuid in dict.fromkeys(uuids):
        ranks = [rank for rank, found in enumerate(uuids) if found == uuid]
        if len(ranks) > 1 and not all(may_share[rank] for rank in ranks):
            raise InvalidArgument(
                f"ranks {', '.join(map(str, ranks))} are on one GPU (UUID {UUID(bytes=uuid)}), where their kernels "
                "wait for each other in turns; give each rank a GPU of its own (device=, LOCAL_RANK; "
                "CUDA_VISIBLE_DEVICES may hide some), or say on each of these ranks that it is meant: "
                "Options(share_device=True) or TRICOMM_SHARE_DEVICE=1"
            )


def check(options: Options, world_size: int) -> None:
    """Refuse a topology of another number of devices; raises `InvalidArgument`."""
    if options.topology is not None and len(options.topology) != world_size:
        raise InvalidArgument(
            f"Options.topology is of {len(options.topology)} devices, the group has {world_size} ranks; one device a "
            "rank is needed, as Topology.of(devices) gives"
        )


def places(topology: Topology | None, world_size: int) -> tuple[cube_mesh.Place, ...] | None:
    """Who is where in a hybrid cube mesh; on other links, or unknown ones, as on a DGX-1V. None unless eight ranks."""
    if world_size != cube_mesh.RANKS:
        return None
    found = cube_mesh.tables(topology) if topology is not None else None
    return found or cube_mesh.tables(dgx1v())


def reach(topology: Topology | None, rank: int) -> tuple[bool, ...] | None:
    """Whose memory `rank` maps on a hybrid cube mesh where not every rank can reach every other one's; else None."""
    if topology is None or topology.all_peers or cube_mesh.tables(topology) is None:
        return None
    return tuple(other == rank or links > 0 for other, links in enumerate(topology.links[rank]))
