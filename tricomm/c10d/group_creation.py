"""Creates groups (for `init_process_group`, `wrap` and DDP's hook), suspends and shrinks them.

The ranks that are left of a group agree over the control pages of its kernels' communicator, as in
`Communicator.shrink`. The smaller group has another store, which its first rank hosts, because the host of the old
store may be lost. Its connections, its NCCL communicator and its kernels' memory are new.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tricomm import arguments
from tricomm.c10d import fallback_backends, group_calls
from tricomm.c10d.call_guard import guarded_call, is_refusal, sends
from tricomm.c10d.capabilities import GroupConfig, exchange_capabilities
from tricomm.c10d.dispatch import Dispatcher
from tricomm.c10d.fallback_backends import Backends
from tricomm.c10d.process_group import TricommGroup
from tricomm.c10d.torch_names import c10d, register, unregister
from tricomm.communicator import Communicator
from tricomm.core.entry_guard import name_refusal
from tricomm.deadline import Deadline
from tricomm.errors import GroupAborted, InvalidArgument, PeerDied, RendezvousError, ResourceError, TricommError
from tricomm.options import Options, check_wire, seconds, with_environment
from tricomm.store.bounded_store import first_line
from tricomm.store.control import ControlPage
from tricomm.store.departures import USUAL, Rules
from tricomm.store.records import Capabilities
from tricomm.store.rendezvous import store_of_this_machine

log = logging.getLogger("tricomm")
_STORE_SECONDS = 0.5  # for an attempt to reach a store of this machine
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
    """A group of the same ranks that runs calls in tricomm's kernels if they support them, else in `group`'s backends.

    Every rank of `group` calls it. Pass the result wherever c10d takes a group (`group=`, `DDP(process_group=)`,
    `torch.ops`); `group` stays usable. `dist.destroy_process_group(wrapped)` ends only the wrapper. Wrapping a
    group again returns the same wrapper. Raises `InvalidArgument` if this process is no member, or if `options` ask for
    batch invariance and the existing wrapper has none; `RendezvousError` if a rank does not join.
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

    Every rank of `group` calls it; a group that is not tricomm's is wrapped first (`wrap`). While it is suspended,
    calls for the kernels are refused. A group that has not used the kernels has no memory yet: it is not suspended, and
    allocates memory at its first call. Raises as `Communicator.suspend` does.
    """
    _step(wrap(group), "suspend", Communicator.suspend, Communicator.resume)


def resume(group: Any = None) -> None:
    """Allocate memory again at the same addresses; every rank of `group` calls it. Raises as `Communicator.resume`
    does."""
    _step(wrap(group), "resume", Communicator.resume, Communicator.suspend)


@sends
def _step(
    group: TricommGroup, what: str, step: Callable[[Communicator], None], back: Callable[[Communicator], None]
) -> None:
    """Run `step` for the communicators of all devices of `group`; if one fails, `back` undoes the others."""
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
    """`group`; raises `InvalidArgument` if `options` ask for batch invariance, which the group lacks."""
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
    register(world, wrapped, name, ("tricomm", store), world.pg_backend_config[group], f"tricomm:{name}")
    _wrapped[group] = wrapped
    return wrapped


def shrink(
    group: Any = None, exclude: Collection[int] | None = None, timeout: float | timedelta | None = None
) -> TricommGroup:
    """A process group of the ranks of `group` (None: the default one) that are left, in the same order. All of them
    call this, after a fault or before ranks are removed; wait for your calls first.

    `exclude` has the ranks to leave out, by their numbers in `group`, the same on all ranks that are left; they may
    still run. None: those whose processes have ended, or that have destroyed the group. The smaller group has the
    timeout and the options of `group`, which is destroyed. If `group` is the default group, the smaller one becomes the
    default group: its ranks get new numbers, and all other groups of this process are destroyed, as by
    `dist.shrink_group`. Objects over a destroyed group must be made again: DDP, FSDP, DeviceMesh, CUDA graphs.

    Raises within `timeout` seconds (default: the group's), on all ranks that are left, which may then call it again, as
    `Communicator.shrink` does; `InvalidArgument` if the ranks of `group` cannot agree, because it is no tricomm group,
    wraps another group, or its kernels share no memory.
    """
    old: Any = dist.group.WORLD if group is None else group
    comm = _agreeing(old)
    limit = seconds(old._config.timeout if timeout is None else timeout, "timeout")
    deadline, made = Deadline(limit), list[tuple[TricommGroup, Any]]()
    drain = partial(old._dispatcher._cpu.drain, limit, old._dispatcher)

    def make(control: ControlPage, members: tuple[int, ...]) -> None:
        made.append(_smaller(old, control, members, deadline))

    try:
        comm._shrink_into(exclude, limit, drain, make)
    except BaseException:
        for new, _ in made:
            _end(new)
        raise
    _take_place(old, *made[0])
    return made[0][0]


def shrink_group(group: TricommGroup, exclude: Any, flags: int, pg_options: Any) -> TricommGroup:
    """`shrink` with the name and the arguments of torch's function. Raises as `shrink`."""
    if flags not in (0, 1) or pg_options is not None:
        raise InvalidArgument(
            f"shrink_group: shrink_flags={flags!r}, pg_options={pg_options!r}: SHRINK_DEFAULT or SHRINK_ABORT and None "
            "are possible, because the smaller group has the options of the group"
        )
    if flags:
        arguments.excluded(exclude, group.rank(), group.size())
        _agreeing(group)._internal.faults.abort(GroupAborted, "shrink_group aborts the calls that still run")
    return shrink(group, exclude)


def _agreeing(group: Any) -> Communicator:
    """The communicator over which the ranks of `group` agree; raises `InvalidArgument` if it cannot be shrunk."""
    if not isinstance(group, TricommGroup):
        raise InvalidArgument(f"shrink: a group of tricomm's that this process is in is needed, found {group!r}")
    if isinstance(group, WrappedGroup):
        raise InvalidArgument(
            f"shrink: {group.group_name!r} wraps a group of another backend, which keeps its ranks: make that group "
            "again without the lost ranks, and wrap it"
        )
    if group not in distributed_c10d._world.pg_map:
        raise InvalidArgument("shrink: this group was destroyed, or torch.distributed did not make it")
    dispatcher: Dispatcher = group._dispatcher  # type: ignore[attr-defined]
    if not dispatcher.devices:
        raise InvalidArgument(
            f"shrink: the ranks of {group.group_name!r} agree through the memory of their kernels, and there is none: "
            "no call was made yet, or the kernels serve none (TRICOMM_CPU=kernels lets them serve CPU tensors). "
            "Destroy the group, and make one of the ranks that are left over a store that is alive"
        )
    return dispatcher._comms[dispatcher.devices[0]]


def _smaller(old: Any, control: ControlPage, members: tuple[int, ...], deadline: Deadline) -> tuple[TricommGroup, Any]:
    """The group of `members` of `old`, which have met on `control`, and its store; or all members raise."""
    before, dispatcher = old._config, old._dispatcher
    error: BaseException | None = None
    store: Any = None
    made: TricommGroup | None = None
    try:
        store = store_of_this_machine(0, deadline.left) if control.rank == 0 else None
    except TricommError as refused:
        error = refused
    port = str(store.port if store is not None else 0).encode()
    port = control.exchange(port, "the store of the smaller group", deadline.left, error=error)[0]
    try:
        name = f"{before.name.partition('/')[0]}/{control.group}"
        store = c10d.PrefixStore(name, store or _joined(control, int(port), deadline))
        ranks = list(range(len(members))) if old is dist.group.WORLD else [before.ranks[rank] for rank in members]
        config = GroupConfig(store, control.rank, control.world_size, before.timeout, ranks, name)
        known = {place: dispatcher._agreed.members[rank] for place, rank in enumerate(members)}
        rules = Rules(on_look=control.give_up_if_refused)
        made = make(config, dispatcher._options, known, limit=max(deadline.left, 1e-3), rules=rules)
        device = dispatcher.devices[0]
        smaller = made._dispatcher

        def look() -> None:
            smaller.still_connected()
            control.give_up_if_refused()

        smaller._communicator(device, max(deadline.left, 1e-3), look)  # so that it can be shrunk again
        if not smaller.devices:
            raise ResourceError(smaller._no_kernels[device.type])
    except TricommError as failed:
        error = failed
    except BaseException:
        if made is not None:
            _end(made)
        raise
    try:
        control.agree(error, "the smaller group", deadline.left)
    except BaseException:
        if made is not None:
            _end(made)
        raise
    assert made is not None, "else there was an error"
    return made, store


def _joined(control: ControlPage, port: int, deadline: Deadline) -> Any:
    """The store at `port`, which rank 0 hosts. Raises `PeerDied` soon if that rank ends; torch waits for a new host."""
    while True:
        try:
            return store_of_this_machine(port, min(_STORE_SECONDS, max(deadline.left, 1e-3)))
        except RendezvousError:
            control.give_up_if_refused()
            if not control.alive(0):
                raise PeerDied("the rank that hosts the store of the smaller group died") from None
            if deadline.passed:
                raise


def _take_place(old: Any, new: TricommGroup, store: Any) -> None:
    """Register `new` with torch in place of `old`. After an interrupt torch may know a group that has ended, but never
    none."""
    world: Any = distributed_c10d._world
    default = old is dist.group.WORLD
    name = new._config.name
    new.setGroupDesc(f"{old.getGroupDesc() or old.group_name}:shrunk")
    backend, config = world.pg_map[old][0], world.pg_backend_config[old]
    register(world, new, name, (backend, store), config, f"ptd:{name}", "")  # as torch's own groups
    ended = [group for group in world.pg_names if group is not new] if default else [old]
    if default:
        distributed_c10d._update_default_pg(new)
        world.pg_group_ranks.pop(dist.GroupMember.NON_GROUP_MEMBER, None)
        world.group_count = 0  # a rank may have got the fault inside `new_group`, after it counted the group
        if others := [world.pg_names[group] for group in ended if group is not old]:
            log.warning("the default group has shrunk, and its ranks have new numbers: %s are destroyed", others)
    for group in ended:
        _end(group)
        unregister(world, group)


def _end(group: Any) -> None:
    """End a group without its other ranks, which may be lost."""
    for end in (group.abort, group.shutdown):
        try:
            end()
        except Exception as error:  # not every backend of torch can abort
            log.debug("the end of %r: %s", group, error)


def ddp_hook(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """DDP communication hook: the mean of a bucket over tricomm. `model.register_comm_hook(None, tricomm.ddp_hook)`.

    `state` is the group (None: the default one), which keeps its backend and is wrapped at the first bucket. With
    (group, wire) every bucket is quantised on the links, as by `Communicator.all_reduce(wire=)`.

    Raises `InvalidArgument` for a bucket that cannot be quantised.
    """
    state, wire = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
    group = wrap(state)
    options = c10d.AllreduceOptions()
    options.reduceOp = c10d.ReduceOp.AVG
    if wire is None:
        future = group.allreduce([bucket.buffer()], options).get_future()
    else:
        future = _quantised(group, bucket.buffer(), options, wire).get_future()
    return future.then(lambda done: done.value()[0])  # type: ignore[no-any-return]


# DDP compares annotations as objects; in this file they are strings.
ddp_hook.__annotations__.update({"bucket": c10d.GradBucket, "return": torch.futures.Future[torch.Tensor]})


@guarded_call
def _quantised(group: TricommGroup, x: torch.Tensor, options: Any, wire: str) -> Any:
    """all_reduce of `x` in place, quantised on the links by `wire`."""
    check_wire(wire, "ddp_hook: wire")
    call = group_calls.in_place("all_reduce", x, group_calls.operation(options.reduceOp))
    call.wire = wire
    return group._submit([call], options, ())


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
    limit: float | None = None,
    rules: Rules = USUAL,
) -> TricommGroup:
    """Agree with the other members over the group's store; make this rank's group and the backends that it needs.

    `known` are members whose processes are known already, `native` the backends of a group that is wrapped. Takes
    `limit` seconds at most, by default the group's timeout, and follows `rules`.
    """
    backends, kind = Backends({}), TricommGroup if native is None else WrappedGroup
    try:
        limit = seconds(config.timeout if limit is None else limit, "timeout")
        agreed = exchange_capabilities(
            config.store, config.rank, config.world_size, limit, lambda: with_environment(options), known, rules
        )
        backends = fallback_backends.make(config, agreed, options, native)
        return kind(replace(config, store=agreed.generation.store), agreed, backends, options)
    except BaseException as error:
        # the others are connected, so the closed connection tells them that this rank has left
        if backends.transport is not None:
            backends.transport.fail(GroupAborted(f"rank {config.rank} was stopped by {first_line(error)}"))
        name_refusal(error)
        raise


def _processes(ranks: list[int]) -> dict[int, Capabilities]:
    """The processes of the global `ranks`, by index in the list, if the job's default group is tricomm's."""
    world = dist.group.WORLD
    generation = world._backends.generation if isinstance(world, TricommGroup) else None
    known = generation.members if generation is not None else {}
    return {place: known[rank] for place, rank in enumerate(ranks) if rank in known}
