"""How groups are made (by `init_process_group`, by `wrap` over a framework's group, by DDP's hook) and suspended."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tricomm.c10d import fallback_backends
from tricomm.c10d.call_guard import is_refusal, sends
from tricomm.c10d.capabilities import GroupConfig, exchange_capabilities
from tricomm.c10d.fallback_backends import Backends
from tricomm.c10d.process_group import TricommGroup
from tricomm.c10d.torch_names import c10d
from tricomm.communicator import Communicator
from tricomm.core.entry_guard import name_refusal
from tricomm.errors import GroupAborted, InvalidArgument
from tricomm.options import Options, seconds, with_environment
from tricomm.store.bounded_store import first_line
from tricomm.store.records import Capabilities

_wrapped: weakref.WeakKeyDictionary[Any, TricommGroup] = weakref.WeakKeyDictionary()
_counts: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


class WrappedGroup(TricommGroup):
    """A second group over the same native backends. Its names cannot be set: torch would set them in the backends."""

    def setGroupName(self, name: str) -> None:
        pass

    def getGroupDesc(self) -> str:
        return "tricomm over another group"

    def setGroupDesc(self, text: str) -> None:
        pass


def wrap(group: Any = None, options: Options | None = None) -> TricommGroup:
    """A group of the same ranks that uses tricomm if its kernels cover a call, else `group`'s own backends.

    Every rank of `group` calls it. Pass the result wherever c10d takes a group (`group=`, `DDP(process_group=)`,
    `torch.ops`); `group` stays usable. `dist.destroy_process_group(wrapped)` ends only the wrapper. Wrapping a
    group again returns the same wrapper. Raises `InvalidArgument` if this process is no member, or if `options` ask for
    batch invariance and the existing wrapper has none; `RendezvousError` if a rank does not come.
    """
    if group is None:
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise InvalidArgument(f"wrap: a process group that this process is in is needed, found {group!r}")
    if isinstance(group, TricommGroup):
        return _as_asked(group, options)
    wrapped = _wrapped.get(group)
    world: Any = distributed_c10d._world
    if wrapped is not None and wrapped in world.pg_map:
        return _as_asked(wrapped, options)
    if group not in world.pg_map:
        raise InvalidArgument(f"wrap: {group!r} was destroyed, or torch.distributed did not make it")
    return _wrap(group, world, options)


def suspend(group: Any = None) -> None:
    """Free the memory of `group`'s kernels until `resume`, as `Communicator.suspend`; NCCL and Gloo keep theirs.

    Every rank of `group` calls it; a group that is not tricomm's is wrapped first (`wrap`). Calls that the kernels
    would run are refused meanwhile. A group that has not used the kernels has no memory yet: it is not suspended, and
    takes memory at its first call. Raises as `Communicator.suspend` does.
    """
    _step(wrap(group), "suspend", Communicator.suspend, Communicator.resume)


def resume(group: Any = None) -> None:
    """Take memory again at the same addresses; every rank of `group` calls it. Raises as `Communicator.resume` does."""
    _step(wrap(group), "resume", Communicator.resume, Communicator.suspend)


@sends
def _step(
    group: TricommGroup, what: str, step: Callable[[Communicator], None], back: Callable[[Communicator], None]
) -> None:
    """Take `step` with the communicators of all devices of `group`, or with none."""
    dispatcher = group._dispatcher
    try:
        with ExitStack() as undo:
            for device in dispatcher.devices:
                dispatcher.step(device, what, step)
                undo.callback(dispatcher.step, device, what, back)
            undo.pop_all()
    except BaseException as error:
        if not is_refusal(error):
            group.interrupted(error)
        raise


def _as_asked(group: TricommGroup, options: Options | None) -> TricommGroup:
    """`group`; raises `InvalidArgument` if `options` ask for batch invariance and it has none."""
    if options is not None and options.batch_invariant and not group.batch_invariant:
        raise InvalidArgument(
            f"wrap: a batch-invariant group is asked for, and {group.group_name!r} was made without; make it with "
            "Options(batch_invariant=True) or TRICOMM_BATCH_INVARIANT=1 from the start"
        )
    return group


def _wrap(group: Any, world: Any, options: Options | None) -> TricommGroup:
    count = _counts[group] = _counts.get(group, 0) + 1
    name = f"{group.group_name}/tricomm{count}"
    backends = {device.type: group._get_backend(device) for device in group._device_types}
    timeout = next((b.options._timeout for b in backends.values() if hasattr(b, "options")), timedelta(minutes=30))
    ranks = dist.get_process_group_ranks(group)
    store = c10d.PrefixStore(name, world.pg_map[group][1])
    config = GroupConfig(store, group.rank(), group.size(), timeout, ranks, name)
    wrapped = make(config, options, native=backends)
    world.pg_map[wrapped] = ("tricomm", store)
    world.pg_names[wrapped] = name
    world.pg_group_ranks[wrapped] = dict(world.pg_group_ranks[group])
    world.pg_backend_config[wrapped] = world.pg_backend_config[group]
    world.pg_to_tag[wrapped] = f"tricomm:{name}"
    world.tags_to_pg.setdefault(f"tricomm:{name}", []).append(wrapped)
    c10d._register_process_group(name, wrapped)
    _wrapped[group] = wrapped
    return wrapped


def ddp_hook(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """DDP communication hook: the mean of a bucket over tricomm. `model.register_comm_hook(None, tricomm.ddp_hook)`.

    `state` is the group (None: the default one), which keeps its backend; it is wrapped at the first bucket.
    """
    group = wrap(state)
    options = c10d.AllreduceOptions()
    options.reduceOp = c10d.ReduceOp.AVG
    future = group.allreduce([bucket.buffer()], options).get_future()
    return future.then(lambda done: done.value()[0])  # type: ignore[no-any-return]


# DDP compares the annotations themselves, which are strings in this file.
ddp_hook.__annotations__.update({"bucket": c10d.GradBucket, "return": torch.futures.Future[torch.Tensor]})


def create(opts: Any, pg_options: Any) -> TricommGroup:
    """Make a group for c10d; called by all its ranks. `pg_options` is a `tricomm.Options`, or None."""
    if pg_options is not None and not isinstance(pg_options, Options):
        raise InvalidArgument(f"pg_options={pg_options!r}: tricomm.Options or None is needed")
    ranks = list(opts.global_ranks_in_group) or list(range(opts.group_size))
    name = str(opts.group_id)
    store = c10d.PrefixStore("tricomm", opts.store)
    config = GroupConfig(store, opts.group_rank, opts.group_size, opts.timeout, ranks, name)
    return make(config, pg_options, _processes(ranks))


def make(
    config: GroupConfig,
    options: Options | None,
    known: Mapping[int, Capabilities] | None = None,
    native: dict[str, Any] | None = None,
) -> TricommGroup:
    """Agree with the other members over the group's store; make this rank's group and the backends that it needs.

    `known` are members whose processes are known already, `native` the backends of a group that is wrapped.
    """
    backends, kind = Backends({}), TricommGroup if native is None else WrappedGroup
    try:
        limit = seconds(config.timeout, "timeout")
        agreed = exchange_capabilities(
            config.store, config.rank, config.world_size, limit, lambda: with_environment(options), known
        )
        backends = fallback_backends.make(config, agreed, options, native)
        return kind(replace(config, store=agreed.generation.store), agreed, backends, options)
    except BaseException as error:
        if backends.transport is not None:  # the others are connected, and tell by that alone that this rank has left
            backends.transport.fail(GroupAborted(f"rank {config.rank} was stopped by {first_line(error)}"))
        name_refusal(error)
        raise


def _processes(ranks: list[int]) -> dict[int, Capabilities]:
    """The processes of the global `ranks`, by place in the list, if the job's default group is tricomm's."""
    world = dist.group.WORLD
    generation = world._backends.generation if isinstance(world, TricommGroup) else None
    known = generation.members if generation is not None else {}
    return {place: known[rank] for place, rank in enumerate(ranks) if rank in known}
