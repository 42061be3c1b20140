"""A communicator: how ranks meet, and what a user can do over the memory that they share."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, Self

import torch
from torch.distributed.distributed_c10d import PrefixStore, Store

from tricomm import arguments, env
from tricomm.core import bootstrap, nccl, topology_agreement
from tricomm.core.entry_guard import guarded, set_up
from tricomm.core.point_to_point import Messages
from tricomm.core.runtime import Runtime
from tricomm.core.symmetric import Symmetric, check_shape
from tricomm.errors import InvalidArgument
from tricomm.kernels import collective_specs, layout
from tricomm.kernels.launch import compiler, interpreter, triton_adapter
from tricomm.metrics.counters import Statistics
from tricomm.options import Options, seconds
from tricomm.policy import backend_choice, selection, user_tables
from tricomm.policy.selection import Choice
from tricomm.policy.tuning_tables import Fingerprint, TableRow
from tricomm.store.arena import Arena
from tricomm.store.control import ControlPage
from tricomm.store.rendezvous import open_store


class Communicator(Messages):
    """Ranks of one node that share memory and run collectives over it; on GPUs, with NCCL behind the kernels.

    `store` is any `torch.distributed` Store, used to meet and never again; `rank` and `world_size` name this process
    in the group; `device` defaults to the current GPU, or to the CPU where there is none, where the kernels run under
    Triton's interpreter. `timeout` (seconds or timedelta; default: `options.timeout`) bounds the meeting and each call.

    `look` is called now and then while this rank waits for the others to meet; what it raises ends the meeting on all
    ranks.

    What the kernels do not take goes to NCCL on GPUs: types, sizes, groups that span nodes or cannot share memory.

    Raises `RendezvousError` where the ranks do not meet or disagree, `ResourceError` where memory or peer access is
    refused and NCCL cannot be used (on every rank, or on none), `InvalidArgument` for bad arguments.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        device: torch.device | str | int | None = None,
        timeout: float | timedelta | None = None,
        options: Options | None = None,
        *,
        meeting_timeout: float | None = None,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        arguments = (store, rank, world_size, device, timeout, options, meeting_timeout, look)
        set_up(lambda undo: self._set_up(undo, *arguments))

    def _set_up(
        self,
        undo: ExitStack,
        store: Store,
        rank: int,
        world_size: int,
        device: torch.device | str | int | None,
        timeout: float | timedelta | None,
        options: Options | None,
        meeting_timeout: float | None,
        look: Callable[[], None],
    ) -> None:
        options = options or Options()
        limit = options.timeout if timeout is None else seconds(timeout, "timeout")
        where = pick_device(device)
        reason = interpreter.supported()
        if reason is not None and where.type == "cpu":
            raise InvalidArgument(f"no kernel can run on the CPU: {reason}")
        reason = compiler.refused()
        if reason is not None and where.type == "cuda":
            raise InvalidArgument(f"no kernel can run on a GPU: {reason}")
        if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
            raise InvalidArgument(f"world_size={world_size!r}: a positive number of ranks is needed")
        if world_size > layout.MAX_WORLD_SIZE and bootstrap.behind(where, options)[0] is None:
            raise InvalidArgument(f"world_size={world_size}: at most {layout.MAX_WORLD_SIZE} ranks are possible")
        topology_agreement.check(options, world_size)
        plan_of_memory = layout.plan(min(world_size, layout.MAX_WORLD_SIZE), options.arena_bytes)
        selection.check_device(where.type, plan_of_memory, options.tile)
        found = bootstrap.join(
            undo, store, rank, world_size, where, limit, meeting_timeout or limit, options, plan_of_memory, look
        )
        super().__init__(
            undo, found.control, found.arena, plan_of_memory, where, limit, options, topology=found.topology,
            routes=found.routes,
        )  # fmt: skip
        self._store: Store | None = store  # one that this rank hosts lives as long as somebody may be meeting there
        self._splits = self._handles = 0

    @classmethod
    def over(
        cls,
        control: ControlPage,
        arena: Arena,
        arena_layout: layout.Layout,
        device: torch.device,
        timeout: float,
        options: Options,
        runtime: Runtime,
    ) -> Self:
        """A communicator over memory that is shared already; it takes over `control` and `arena`."""
        comm = cls.__new__(cls)
        make = partial(Messages.__init__, comm)
        set_up(lambda undo: make(undo, control, arena, arena_layout, device, timeout, options, runtime))
        comm._store, comm._splits, comm._handles = None, 0, 0
        return comm

    def __enter__(self) -> Communicator:
        return self

    @guarded
    def split(self, ranks: Sequence[int]) -> Communicator | None:
        """A communicator of `ranks` of this one, in that order; called by all ranks with the same list.

        Members get it, with this one's device, timeout and options, and close it themselves; the others get None. The
        ranks meet over this communicator's store, which has to be alive. Raises `InvalidArgument` on all ranks for a
        list that cannot be or that differs between ranks (the group stays usable), else as `Communicator`.
        """
        self._usable()
        if self._store is None:
            raise InvalidArgument("split: ranks of one process have no store to meet over; make a group of that size")
        members, error = _members(ranks, self.world_size)
        with self._my_turn(), self._or_give_up("split"):
            self._control.agree(error, "split", self._timeout, abort_on_fault=True)
            self._control.require_equal(repr(members), "split", self._timeout, abort_on_fault=True)
            self._splits += 1
        if self.rank not in members:
            return None
        topology = self.options.topology.of(members) if self.options.topology is not None else None
        store = PrefixStore(f"tricomm-split-{self.group}-{self._splits}", self._store)
        options = replace(self.options, topology=topology)
        return Communicator(store, members.index(self.rank), len(members), self.device, self._timeout, options)

    # A user's own kernels

    @guarded
    def symmetric(self, shape: Sequence[int], dtype: torch.dtype) -> Symmetric:
        """Memory of `shape` and `dtype` on every rank that every peer can reach. Collective; the same on all ranks.

        Raises `InvalidArgument` on all ranks where one asks for what cannot be or where they ask for different things
        (the group stays usable), `ResourceError` where memory is refused anywhere.
        """
        self._usable()
        if self._runtime.no_symmetric is not None:
            raise InvalidArgument(f"symmetric: {self._runtime.no_symmetric}")
        if not self._site.reachable:
            raise InvalidArgument("symmetric: not every rank reaches every other one's memory on these GPUs' links")
        sizes, error = check_shape(shape, dtype)
        with self._my_turn(), self._or_give_up("symmetric"):
            self._control.agree(error, "symmetric", self._timeout, abort_on_fault=True)
            self._control.require_equal(repr((sizes, dtype)), "symmetric", self._timeout, abort_on_fault=True)
            arena = self._runtime.symmetric(self._control, sizes, dtype, self.device, self._timeout)
            self._owned.append(arena)
            self._handles += 1
            return Symmetric(arena, self.rank, sizes, dtype, self.device, self.group, self._handles)

    @guarded
    def launch(self, kernel: Any, grid: Any, *args: Any, **constexprs: Any) -> None:
        """Run a user's `@triton.jit` kernel where this communicator's tensors live.

        Positional arguments are runtime values (tensors, tuples of tensors, numbers), keywords constexprs and launch
        options. `grid` is a number, a tuple of up to three, or a function of the constexprs. On a CPU the kernel is
        interpreted and has run on return. Waits that use `primitives` end when a peer is gone or the time is up; this
        call then raises what happened (on a GPU the next one, `synchronize()` or `close()` does).

        Raises `InvalidArgument` before anything runs for a kernel, grid or arguments that do not fit.
        """
        self._usable()
        if not triton_adapter.is_kernel(kernel):
            raise InvalidArgument(f"launch: a plain @triton.jit kernel is needed, found {type(kernel).__name__}")
        run = self._runtime.prepare(kernel, grid, args, constexprs, self.device, self._timeout)
        self._captured |= self._gpu is not None and self._gpu.capturing()
        with self._my_turn(), self._monitor.user_call(self._gpu):
            self._guarded(run)

    def explain(
        self,
        collective: str,
        nbytes: int,
        dtype: torch.dtype | None = None,
        op: Any = "sum",
        algorithm: str | None = None,
        protocol: str | None = None,
        mode: str = "eager",
    ) -> Choice:
        """Who runs a call with `nbytes` bytes of input, by which kernel, and why. Pure: asks no other rank.

        The input is a rank's, of a root's where there is one; `dtype` is float32 where none is given; `mode` is eager,
        or graph for a captured call. Whether NCCL can be used at all shows when a call first goes there.
        """
        if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 0:
            raise InvalidArgument(f"explain: nbytes={nbytes!r}: a number of bytes is needed")
        if mode not in ("eager", "graph"):
            raise InvalidArgument(f"explain: mode={mode!r}: eager or graph is needed")
        if not isinstance(dtype, torch.dtype | None):
            raise InvalidArgument(f"explain: dtype={dtype!r}: a torch.dtype or None is needed")
        name = arguments.operation(op)
        bits = arguments.DTYPES[dtype].bits if dtype in arguments.DTYPES else 32
        kind = collective_specs.find(collective)
        if (
            collective in backend_choice.POINT_TO_POINT
        ):  # kernels alone: NCCL's communicator is made by all ranks together
            return selection.choose(self._site, collective, nbytes, algorithm, protocol, mode, bits=bits)
        forced = algorithm is not None or protocol is not None
        size = None if kind.uneven else nbytes
        route = backend_choice.decide(self._routes, collective, dtype, name if kind.reduces else "none", size, forced)
        if route.backend != backend_choice.NCCL:
            return selection.choose(self._site, collective, nbytes, algorithm, protocol, mode, bits=bits)
        if kind.reduces and dtype is not None:
            nccl.check(collective, name, dtype)
        return selection.nccl(collective, route.reason)

    def stats(self) -> Statistics:
        """Calls, bytes and times by kernel and size, and how long this rank waited for whom. Asks no other rank.

        Times are those of the calls that `time_calls` has chosen.
        """
        if self._activity.clock is not None:
            self._activity.clock.collect()
        return self._activity.statistics()

    @guarded
    def time_calls(self, every: int) -> None:
        """Time every `every`th call of each shape from now on; 0: none. Each rank may have its own.

        On a GPU a call is timed by events on its stream, at the cost of recording them. Calls in a CUDA graph are not
        timed; call this before calls are warmed up for a capture, for it forgets what they have prepared. Raises
        `InvalidArgument` for a negative number.
        """
        self._usable()
        self._activity.time_calls(every)
        self._forget()

    @guarded
    def use_table(self, rows: Sequence[TableRow], name: str) -> None:
        """Choose by `rows` from now on, and by the shipped tables what they don't cover. Called by all ranks together.

        For tuners. `name` is what `explain` calls them. Raises `InvalidArgument` on all ranks where their rows differ;
        then nothing has changed.
        """
        self._usable()
        given = tuple(rows)
        with self._my_turn(), self._or_give_up("use_table"):
            digest = hashlib.sha256(repr((given, name)).encode()).hexdigest()
            self._control.require_equal(f"table {digest[:32]}", "use_table", self._timeout, abort_on_fault=True)
            self._site = replace(self._site, tuned=given, tuned_name=name)
            self._forget()

    @property
    def fingerprint(self) -> Fingerprint:
        """What kind of box this group runs on: what tuning tables are keyed by."""
        return user_tables.fingerprint(self._site.device, self.device, self.world_size, self.topology)


def init(
    url: str = "env://",
    rank: int | None = None,
    world_size: int | None = None,
    device: torch.device | str | int | None = None,
    timeout: float | timedelta | None = None,
    options: Options | None = None,
) -> Communicator:
    """Meet at `url` ("env://", "tcp://host:port" or "file:///path") and return a communicator.

    `rank` and `world_size` come from the URL's query, from these arguments, or from RANK and WORLD_SIZE; torchrun
    sets everything that "env://" needs. A store that this starts listens on the given address only, never on all.
    Raises `InvalidArgument`, `RendezvousError` or `ResourceError`.
    """
    limit = (options or Options()).timeout if timeout is None else seconds(timeout, "timeout")
    where = pick_device(device)  # a mistake here is told before anybody is met
    began = time.monotonic()
    store, rank, world_size = open_store(url, rank, world_size, limit)
    left = max(0.1, limit - (time.monotonic() - began))
    return Communicator(store, rank, world_size, where, timeout, options, meeting_timeout=left)


def _members(ranks: object, world_size: int) -> tuple[tuple[int, ...], InvalidArgument | None]:
    """The ranks of a split, and what is wrong with them, if anything."""
    found = tuple(ranks) if isinstance(ranks, Sequence) and not isinstance(ranks, str) else ()
    whole = all(isinstance(r, int) and not isinstance(r, bool) and 0 <= r < world_size for r in found)
    if not found or not whole or len(set(found)) < len(found):
        return (), InvalidArgument(f"split: ranks={ranks!r}: different ranks from 0 to {world_size - 1} are needed")
    return found, None


def pick_device(device: torch.device | str | int | None) -> torch.device:
    """The device that a user means; None: the current GPU, else the CPU. Raises `InvalidArgument`."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InvalidArgument(f"device={device!r}: {error}") from None
    if found.type not in ("cpu", "cuda"):
        raise InvalidArgument(f"device={device!r}: a CPU or a CUDA device is needed")
    if found.type == "cuda":
        if not torch.cuda.is_available():
            raise InvalidArgument(f"device={device!r}: this process sees no CUDA device")
        if found.index is None:
            found = torch.device("cuda", _index())
        count = torch.cuda.device_count()
        if not 0 <= found.index < count:
            names = ", ".join(f"cuda:{n} ({torch.cuda.get_device_name(n)})" for n in range(count))
            raise InvalidArgument(
                f"device={device!r}: there is no such GPU in this process, which sees {names}; look at "
                "CUDA_VISIBLE_DEVICES"
            )
    return torch.device("cpu") if found.type == "cpu" else found


def _index() -> int:
    """The current device; LOCAL_RANK, which torchrun sets, chooses one if nobody has."""
    index, local = torch.cuda.current_device(), env.integer("LOCAL_RANK")
    return local % torch.cuda.device_count() if index == 0 and local is not None else index
