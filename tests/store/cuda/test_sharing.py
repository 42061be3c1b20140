"""All ways to share GPU memory, legacy IPC, descriptors and fabric handles, over a fake driver. No GPU."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import pytest

from tests.marks import some
from tests.store.cuda.fake_driver import FakeCuda
from tests.store.cuda.jobs import GRANULE, NBYTES, Job, calls_of, fails_on_all, refused, two_gpus, works
from tests.store.store_ranks import in_threads
from tricomm.errors import RendezvousError, ResourceError
from tricomm.store.arenas import cuda_ipc, cuda_vmm, registered_memory
from tricomm.store.arenas.cuda_ipc import BlockRecord, open_cuda_ipc
from tricomm.store.arenas.cuda_vmm import VmmRecord, open_cuda_vmm
from tricomm.store.arenas.passing import TOKEN_BYTES
from tricomm.store.arenas.registered_memory import PiecesRecord
from tricomm.store.cuda.cuda_driver import FABRIC

KINDS = {"cuda_ipc": open_cuda_ipc, "cuda_vmm": open_cuda_vmm}
BOTH = pytest.mark.parametrize("how", KINDS.values(), ids=KINDS)
PLACES = {
    "one rank": (1, [[0]]),
    "same GPU": (1, [[0], [0]]),
    "own GPUs, same order": (2, [[0, 1], [1, 0]]),
    "three GPUs, all orders": (3, [[0, 1, 2], [2, 0, 1], [1, 2, 0]]),
    "peers invisible": (2, [[0], [1]]),
    "two ranks on each GPU": (2, [[0, 1], [0, 1], [1, 0], [1]]),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gpus, visible", PLACES.values(), ids=PLACES.keys())
def test_every_rank_reaches_every_block(verified, gpus, visible, kind):
    job = verified(Job(FakeCuda(gpus), visible, KINDS[kind]))
    arenas = job.open_all()
    for arena in arenas:
        assert (arena.kind, arena.nbytes, len(set(arena.bases)), arena.reason) == (kind, NBYTES, job.size, "")
    works(job, arenas)
    assert job.close_all(arenas) == [None] * job.size  # and again in the end


CALLS = {name: calls_of(two_gpus(how)) for name, how in KINDS.items()}
FABRIC_ALONE = {"cuMemCreate", "cuMemExportToShareableHandle", "cuMemImportFromShareableHandle", "cuMemMap"}
by_fabric = partial(open_cuda_vmm, sharing=FABRIC)
BY_FABRIC = [call for call in calls_of(two_gpus(by_fabric)) if call[1] in FABRIC_ALONE]
FAILING = [(open_cuda_ipc, *call) for call in CALLS["cuda_ipc"]] + [(by_fabric, *call) for call in BY_FABRIC]
FAILING += some(
    [(open_cuda_vmm, *call) for call in CALLS["cuda_vmm"]],
    lambda number, call: call[3] == 1 or call[2] == "cuMemRelease",
)


@pytest.mark.parametrize("how, rank, name, nth", FAILING)
def test_any_failing_call_fails_all_ranks_and_leaves_nothing(how, rank, name, nth):
    fails_on_all(two_gpus(how), rank, name, nth)


@BOTH
@pytest.mark.parametrize("rank", [0, 1])
def test_writes_that_do_not_arrive_are_refused_by_all(verified, rank, how):
    job = verified(two_gpus(how))
    job.drivers[rank].process.loses_writes_to_peers = True
    refused(in_threads(2, job.open), ResourceError, f"rank {1 - rank}", f"rank(s) [{rank}]", "did not arrive")


@BOTH
def test_a_full_gpu_is_named(verified, how):
    job = verified(Job(FakeCuda(1, capacity=3 << 20), [[0], [0]], how))
    refused(in_threads(2, job.open), ResourceError, "CUDA_ERROR_OUT_OF_MEMORY", "smaller arena")


@BOTH
def test_different_sizes_are_refused_by_all(verified, how):
    job = verified(two_gpus(how))
    refused(in_threads(2, lambda rank: job.open(rank, NBYTES * (rank + 1))), RendezvousError, "8192", "4096")


UUID = bytes(range(16))
IPC = BlockRecord(3, UUID, NBYTES, 256, bytes(range(64)))
VMM = VmmRecord(3, UUID, NBYTES, GRANULE, bytes(range(TOKEN_BYTES)))
PIECES = PiecesRecord(3, UUID, NBYTES, 64, (GRANULE, GRANULE), bytes(range(8)))
PARSERS = {
    BlockRecord: cuda_ipc.parse_record,
    VmmRecord: cuda_vmm.parse_record,
    PiecesRecord: registered_memory.parse_pieces,
}
ALL = (IPC, VMM, PIECES)


def changed(good, **fields):
    """The bytes of the record `good` with other fields."""
    return (good._replace(**fields) if good is IPC else replace(good, **fields)).pack()


BAD = [(good, b"", "0 bytes") for good in ALL] + [(good, b"X" + good.pack()[1:], "version") for good in ALL]
BAD += [(good, good.pack() + b"x", "bytes") for good in (IPC, VMM)]
BAD += [(IPC, IPC.pack()[:4] + b"\x01\x00" + IPC.pack()[6:], "version")]
BAD += [(good, changed(good, rank=4), "rank 4") for good in ALL]
BAD += [(good, changed(good, nbytes=NBYTES + 1), "size") for good in ALL]
BAD += [(IPC, changed(IPC, offset=offset), "allocation") for offset in (2 << 20, 255)]
BAD += [(VMM, changed(VMM, whole=whole), "not what CUDA gives") for whole in (NBYTES - 1, 1 << 60)]
BAD += [
    (PIECES, changed(PIECES, offset=GRANULE), "are not in the allocations"),
    (PIECES, changed(PIECES, sizes=()), "are not in the allocations"),
]
BAD += [
    (PIECES, changed(PIECES, sizes=sizes), "are not in the allocations") for sizes in ((0, GRANULE), (1 << 63, 1 << 63))
]
BAD += [(PIECES, changed(PIECES, sizes=(64,), offset=0), "are not in the allocations")]


@pytest.mark.parametrize("good, record, words", BAD)
def test_a_bad_record_is_refused(good, record, words):
    parse = PARSERS[type(good)]
    assert parse(good.pack(), 3, NBYTES) == good
    with pytest.raises(RendezvousError, match=words):
        parse(record, 3, NBYTES)


@pytest.mark.parametrize(
    "good, sane",
    [(IPC, lambda record: record.offset < 2 << 20), (VMM, lambda record: NBYTES <= record.whole <= 1 << 47)],
)
def test_random_records_are_refused_or_sane(good, sane):
    draw, packed = random.Random(1), good.pack()
    for _ in range(20_000):
        data = bytearray(packed)
        for _ in range(draw.randint(1, 4)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        try:
            end = draw.choice([len(packed), len(packed), draw.randrange(200)])
            record = PARSERS[type(good)](bytes(data[:end]), 3, NBYTES)
        except RendezvousError:
            continue
        assert record.rank == 3 and record.nbytes == NBYTES and sane(record)


def test_a_handle_is_not_printed():
    assert len(IPC.pack()) <= 1024 and "\\x" not in repr(IPC) and "handle" not in repr(IPC)
