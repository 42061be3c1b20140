"""A dump of the flight recorder: a dict in torch's format, which `torch.distributed.flight_recorder` reads.

torch's analyser matches the calls of a group by number, and compares kind, sizes, types and states. So sizes are given
as numbers of elements, which are the same on all ranks, not as shapes. It does not match messages in groups of more
than two ranks, so here all messages from one rank to another with one tag form a group.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch

from tricomm.kernels import collective_specs
from tricomm.store import process
from tricomm.store.control import Descriptor, PackedDescriptor

VERSION = "2.10"  # of the format that torch 2.13 writes
# An entry is a list: the call's number in its group (0: withdrawn), the call, the times at which it was made, started
# and ended (nanoseconds of Unix time; 0: not yet), `more`, shapes of input and output if rows are uneven, and its stack
# if stacks are recorded. The call is
#     a descriptor of the control page (its count: elements per row); `more`: the last epoch that had ended before
#     the fields of a `Made`, or a list of these, for calls of a torch.distributed group; `more`: the name of their line
# A message has its peer as root, and its number among the messages of the same peers, direction and tag.
NUMBER, WHAT, CREATED, STARTED, ENDED, MORE, SHAPES, STACK = range(8)
Entry = list[Any]
# A call on a fast path makes a shorter entry: (number, what, created, more[, ended, shapes]).
Short = tuple[Any, ...]
ANY = -1  # the peer of a receive whose source is not known yet
# The names in dumps of NCCL's groups. The analysers of torch 2.11 and 2.12 refuse other names.
_NAMES = dict.fromkeys(collective_specs.FUSED, "all_reduce") | {
    "all_to_all_v": "all_to_all",
    "all_reduce_sparse": "all_reduce",
    "all_gather_v": "ALLGATHER_coalesced",
    "reduce_scatter_v": "REDUCE_SCATTER_coalesced",
    "barrier": "all_reduce_barrier",
}
COALESCED = {
    "all_reduce": "allreduce_coalesced",
    "all_gather": "all_gather_into_tensor_coalesced",
    "reduce_scatter": "reduce_scatter_tensor_coalesced",
}


def full(entry: Entry | Short) -> Entry:
    """A copy of an entry, with all fields."""
    if isinstance(entry, list):
        return entry.copy()
    number, what, created, more, *rest = entry
    ended, shapes = rest or (0, None)
    return [number, what, created, 0, ended, more, shapes, None]


def begun(number: int, what: Any) -> Entry:
    """The entry of a call that begins now."""
    now = time.time_ns()
    return [number, what, now, now, 0, None, None, None]


class Made(NamedTuple):
    """A call of a group of `torch.distributed`. `elements`: of its input, of the root's if there is one; `sizes`
    and `splits` as in `GroupCall`."""

    collective: str
    op: str
    dtype: torch.dtype | None
    elements: int
    root: int
    sizes: tuple[int, ...] = ()
    splits: tuple[list[int], list[int]] | None = None


class Recorded(Protocol):
    """The part of a `FlightRecorder` from which a dump is made; `first` is the number of the first call to dump."""

    name: str
    ranks: tuple[int, ...]
    rank: int
    timeout: float
    origin: str

    def entries(self) -> list[Entry]: ...
    def first(self, numbers: list[int]) -> int: ...


class _Stream(NamedTuple):
    """Calls with a common count, which are one group for the analyser; `ranks` are its ranks in the job."""

    name: str
    text: str
    ranks: tuple[int, ...]


def _stream(recorder: Recorded) -> _Stream:
    return _Stream(recorder.name, ", ".join(filter(None, ("tricomm", recorder.origin))), recorder.ranks)


def document(recorders: Sequence[Recorded]) -> dict[str, Any]:
    """The dump of one rank's recorders."""
    written, configs, dumped = time.time_ns(), dict[str, Any](), list[dict[str, Any]]()
    for recorder in recorders:
        streams: dict[_Stream, list[dict[str, Any]]] = {_stream(recorder): []}
        for entry in recorder.entries():
            stream, call = _dumped(recorder, entry)
            streams.setdefault(stream, []).append(call)
        for stream, calls in streams.items():
            calls.sort(key=lambda call: call["collective_seq_id"])
            first = recorder.first([call["collective_seq_id"] for call in calls])
            calls = [call for call in calls if call["collective_seq_id"] >= first]
            for call in calls:
                call["pg_id"] = len(configs)
            configs[stream.name] = {"name": stream.name, "desc": stream.text, "ranks": str(list(stream.ranks))}
            dumped += calls
    for number, call in enumerate(dumped):
        call["record_id"] = call["op_id"] = number
    return {
        "version": VERSION,
        "comm_lib_version": "tricomm",
        "pg_config": configs,
        "pg_status": {},
        "entries": dumped,
        "written_ns": written,
        "boot": process.boot_id().hex(),  # processes of one boot have one clock
    }


def _dumped(recorder: Recorded, entry: Entry) -> tuple[_Stream, dict[str, Any]]:
    """An entry in torch's form, without its numbers in the dump, and its stream."""
    number, what, created, started, ended, more, shapes, stack = entry
    if isinstance(what, PackedDescriptor):
        what = what.unpacked()
    made, how = calls_of(what, len(recorder.ranks), shapes), ""
    if isinstance(what, Descriptor):
        how = f"{what.algorithm}/{what.protocol}, grid {what.grid}, {what.mode}"
    first, message = made[0], made[0].collective in collective_specs.MESSAGES
    name = _NAMES.get(first.collective, first.collective)
    stream = _stream(recorder)
    if message:
        stream, name = _message(recorder, first)
    elif len(made) > 1:
        name = COALESCED.get(name, name)
        how = f"{len(made)} calls"
    if not isinstance(what, Descriptor) and not message and more:
        stream = stream._replace(name=f"{recorder.name}/{more.removesuffix('/')}", text="calls of a callback")
    root = f"root {first.root}" if first.root >= 0 and not message else ""
    elements = [sizes(each, len(recorder.ranks)) for each in made]
    dtypes = [torch_name(each.dtype) for each in made if each.dtype is not None]
    call = {
        "process_group": (stream.name, stream.text),
        "collective_seq_id": number,
        "p2p_seq_id": number if message else 0,
        "is_p2p": message,
        "profiling_name": f"nccl:{name}",  # the analyser knows torch's backends only
        "time_created_ns": created,
        "time_discovered_started_ns": started or None,
        "time_discovered_completed_ns": ended or None,
        "state": "completed" if ended else "started" if started else "scheduled",
        "retired": bool(ended),
        "timeout_ms": int(recorder.timeout * 1e3),
        "input_sizes": [given for given, _ in elements],
        "output_sizes": [taken for _, taken in elements],
        "input_dtypes": dtypes,
        "output_dtypes": dtypes.copy(),
        "thread_id": "",
        "thread_name": "",
        "tricomm": " ".join(filter(None, (first.op.replace("none", ""), root, how))),
    }
    if started and ended:
        call["duration_ms"] = (ended - started) / 1e6
    if stack is not None:
        call["frames"] = [
            {"name": code.co_qualname, "filename": code.co_filename, "line": line} for code, line in stack
        ]
    return stream, call


def calls_of(what: Any, world_size: int, shapes: Any = None) -> list[Made]:
    """The calls of an entry, from its fields `WHAT` and `SHAPES`."""
    if isinstance(what, PackedDescriptor):
        what = what.unpacked()
    if isinstance(what, Descriptor):
        return [_of_descriptor(what, shapes, world_size)]
    return [Made(*each) for each in (what if isinstance(what, list) else [what])]


def _of_descriptor(what: Descriptor, shapes: Any, world_size: int) -> Made:
    splits, rows = None, 1
    if what.collective == "all_to_all_v" and shapes is not None:
        splits = [shapes[0].numel()], [shapes[1].numel()]
    elif what.collective in collective_specs.COLLECTIVES:
        rows = collective_specs.find(what.collective).rows_in(world_size)
    dtype = getattr(torch, what.dtype, None)
    return Made(what.collective, what.op, dtype, what.count * rows, what.root, (), splits)


def sizes(made: Made, world_size: int) -> tuple[list[int], list[int]]:
    """Sizes of input and output. A tensor that only the root has is given on every rank."""
    if made.sizes:
        return list(made.sizes), list(made.sizes)
    if made.splits is not None:
        return [sum(made.splits[0])], [sum(made.splits[1])]
    if made.collective == "barrier":
        return [], []
    form = collective_specs.COLLECTIVES.get(made.collective)
    if form is None or form.uneven:
        return [made.elements], [made.elements]
    return [made.elements], [made.elements // form.rows_in(world_size) * form.rows_out(world_size)]


def _message(recorder: Recorded, made: Made) -> tuple[_Stream, str]:
    """The stream of a message, and the message's name, which has its ranks' places among the stream's ranks in
    ascending order."""
    me, sent = recorder.rank, made.collective == "send"
    if made.root == ANY:  # a separate stream, because the sender is not known
        return _Stream(f"{recorder.name} any rank->{me} {made.op}", "messages", (me,)), "recv 0<-0"
    peer = recorder.ranks[made.root]
    source, target = (me, peer) if sent else (peer, me)
    pair = tuple(sorted((source, target)))
    stream = _Stream(f"{recorder.name} {source}->{target} {made.op}", "messages", pair)
    first, last = pair.index(source), pair.index(target)
    return stream, f"send {first}->{last}" if sent else f"recv {last}<-{first}"


@cache
def torch_name(dtype: torch.dtype) -> str:
    """The C++ name of a dtype, such as "BFloat16"."""
    return torch.empty(0, dtype=dtype, device="cpu").type().removeprefix("torch.").removesuffix("Tensor")
