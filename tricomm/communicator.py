"""A communicator: ranks that share an arena, and the collectives over it.

    user tensor -> all_reduce -> check -> plan (selection, once a shape) -> one kernel -> peers' mailboxes -> tensor

Calls are checked before anything is sent, so a refused call consumes no sequence number and the group stays usable.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from typing import Any, Self

import torch
from torch.distributed.distributed_c10d import Store

from tricomm import calls, env, plan, selection
from tricomm.errors import InvalidArgument
from tricomm.group import Group
from tricomm.kernels import interpreter, layout
from tricomm.options import Options, seconds
from tricomm.runtime import Runtime
from tricomm.selection import Choice
from tricomm.store.arena import Arena, open_arena
from tricomm.store.control import ControlPage
from tricomm.store.rendezvous import meet, open_store
from tricomm.symmetric import Symmetric, check_shape
from tricomm.work import Work

_MOST_PLANS = 1024


class Communicator(Group):
    """Ranks of one node that share memory and run collectives over it.

    `store` is any `torch.distributed` Store, used to meet and never again; `rank` and `world_size` name this process
    in the group; `device` defaults to the current GPU, or to the CPU where there is none, where the kernels run under
    Triton's interpreter. `timeout` (seconds or timedelta; default: `options.timeout`) bounds the meeting and each call.

    Raises `RendezvousError` where the ranks do not meet or disagree, `ResourceError` where memory or peer access is
    refused (on every rank, or on none), `InvalidArgument` for bad arguments.
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
    ) -> None:
        options = options or Options()
        limit = options.timeout if timeout is None else seconds(timeout, "timeout")
        where = pick_device(device)
        reason = interpreter.supported()
        if reason is not None and where.type == "cpu":
            raise InvalidArgument(f"no kernel can run on the CPU: {reason}")
        if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
            raise InvalidArgument(f"world_size={world_size!r}: a positive number of ranks is needed")
        if world_size > layout.MAX_WORLD_SIZE:
            raise InvalidArgument(f"world_size={world_size}: at most {layout.MAX_WORLD_SIZE} ranks are possible")
        plan_of_memory = layout.plan(world_size, options.arena_bytes)
        selection.check_device(where.type, plan_of_memory, options.tile)
        agreed = options.agreed(plan_of_memory, where.type)
        with ExitStack() as undo:
            control = meet(store, rank, world_size, meeting_timeout or limit, agreed)
            undo.callback(control.close)
            arena = open_arena(control, plan_of_memory.nbytes, where, limit)
            undo.callback(arena.close)
            super().__init__(control, arena, plan_of_memory, where, limit, options)
            undo.pop_all()
        self._store = store  # a store that this rank hosts lives as long as somebody may still be meeting there

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
        Group.__init__(comm, control, arena, arena_layout, device, timeout, options, runtime)
        return comm

    def __enter__(self) -> Communicator:
        return self

    # Collectives

    def all_reduce(
        self,
        x: torch.Tensor | Symmetric,
        op: Any = "sum",
        out: torch.Tensor | None = None,
        *,
        algorithm: str | None = None,
        protocol: str | None = None,
        async_op: bool = False,
    ) -> Any:
        """Reduce `x` over all ranks, element by element, in rank order; every rank gets the same bits.

        In place, or into `out` (same shape and dtype). `op` is sum, avg, min, max or prod, or a `ReduceOp`. 16-bit
        floats are accumulated in fp32 and rounded once. Returns the output, or a `Work` with `async_op=True`.
        Raises `InvalidArgument` before anything is sent; a fault of the group raises its own error.
        """
        if out is None and calls.is_plain(x, self.device):
            self._usable()
            self._run("all_reduce", calls.operation(op), x, x, algorithm, protocol)  # type: ignore[arg-type]
            return self._finish(x, True) if async_op else x
        tensor = x.local if isinstance(x, Symmetric) else x
        name = calls.operation(op)
        self._check_input(tensor, "all_reduce")
        if out is None:
            calls.check_writable(tensor, "all_reduce")
            target, result = tensor, x
        else:
            self._check_input(out, "all_reduce out")
            calls.check_output(out, tuple(tensor.shape), tensor, "all_reduce")
            calls.check_apart(tensor, out, "all_reduce")
            target, result = out, out
        source = tensor.contiguous()
        into = target if target.is_contiguous() else source
        self._run("all_reduce", name, source, into, algorithm, protocol)
        if into is not target:
            target.copy_(into)
        return self._finish(result, async_op)

    def all_gather(
        self,
        x: torch.Tensor | Symmetric,
        out: torch.Tensor | None = None,
        *,
        algorithm: str | None = None,
        protocol: str | None = None,
        async_op: bool = False,
    ) -> Any:
        """Concatenate every rank's `x` along dimension 0, in rank order, into `out` or a new tensor.

        `x` has the same shape and dtype on all ranks; `out` has its shape with dimension 0 multiplied by the world
        size (a scalar counts as one element). In place where `x` is this rank's row of `out`. Returns the output, or a
        `Work` with `async_op=True`.
        """
        tensor = x.local if isinstance(x, Symmetric) else x
        self._check_input(tensor, "all_gather")
        shape = (self.world_size * (tensor.shape[0] if tensor.dim() else 1), *tensor.shape[1:])
        if out is None:
            out = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
        else:
            self._check_input(out, "all_gather out")
            calls.check_output(out, shape, tensor, "all_gather")
            calls.check_apart(tensor, out, "all_gather", self.rank)
        self._run("all_gather", "none", tensor.contiguous(), out, algorithm, protocol)
        return self._finish(out, async_op)

    def barrier(self, *, async_op: bool = False) -> Any:
        """Return when every rank has entered its barrier; with `async_op=True` a `Work`. Returns None."""
        self._usable()
        self._launch(self._plan("barrier", "none", None, 0, True, None, None), self._group, self._group, 0)
        if not async_op:
            self.synchronize()
        return self._finish(None, async_op)

    # A user's own kernels

    def symmetric(self, shape: Sequence[int], dtype: torch.dtype) -> Symmetric:
        """Memory of `shape` and `dtype` on every rank that every peer can reach. Collective; the same on all ranks.

        Raises `InvalidArgument` on all ranks where one asks for what cannot be or where they ask for different things
        (the group stays usable), `ResourceError` where memory is refused anywhere.
        """
        self._usable()
        if self._runtime.no_symmetric is not None:
            raise InvalidArgument(f"symmetric: {self._runtime.no_symmetric}")
        sizes, error = check_shape(shape, dtype)
        with self._my_turn(), self._or_give_up("symmetric"):
            self._control.agree(error, "symmetric", self._timeout, heed_faults=True)
            asked = repr((sizes, dtype)).encode()[:512]
            answers = self._control.exchange(asked, "symmetric", self._timeout, heed_faults=True)
            for rank, theirs in enumerate(answers):
                if theirs != answers[0]:
                    raise InvalidArgument(f"symmetric: rank 0 asked for {answers[0]!r}, rank {rank} for {theirs!r}")
            arena = self._runtime.symmetric(self._control, sizes, dtype, self.device, self._timeout)
            self._owned.callback(arena.close)
            return Symmetric(arena, self.rank, sizes, dtype, self.device)

    def launch(self, kernel: Any, grid: Any, *args: Any, **constexprs: Any) -> None:
        """Run a user's `@triton.jit` kernel where this communicator's tensors live.

        Positional arguments are runtime values (tensors, tuples of tensors, numbers), keywords constexprs and launch
        options. `grid` is a number, a tuple of up to three, or a function of the constexprs. On a CPU the kernel is
        interpreted and has run on return. Waits that use `primitives` end when a peer is gone or the time is up; this
        call then raises what happened (on a GPU the next one, `synchronize()` or `close()` does).

        Raises `InvalidArgument` before anything runs for a kernel, grid or arguments that do not fit.
        """
        self._usable()
        if not hasattr(kernel, "fn") or not hasattr(kernel, "params"):
            raise InvalidArgument(f"launch: a plain @triton.jit kernel is needed, found {type(kernel).__name__}")
        run = self._runtime.prepare(kernel, grid, args, constexprs, self.device, self._timeout)
        with self._my_turn(), self._monitor.user_call(self.device):
            self._guarded(run)

    def explain(
        self,
        collective: str,
        nbytes: int,
        dtype: torch.dtype | None = None,
        op: Any = "sum",
        algorithm: str | None = None,
        protocol: str | None = None,
    ) -> Choice:
        """Which kernel a call with `nbytes` bytes of input per rank would run, and why. Pure: asks no other rank."""
        if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 0:
            raise InvalidArgument(f"explain: nbytes={nbytes!r}: a number of bytes is needed")
        if dtype is not None and dtype not in calls.DTYPES:
            raise InvalidArgument(
                f"explain: dtype {dtype} is not supported; there is {', '.join(calls.DTYPES.values())}"
            )
        calls.operation(op)
        return selection.choose(self._site, collective, nbytes, algorithm, protocol)

    def _check_input(self, x: Any, what: str) -> None:
        self._usable()
        calls.check_tensor(x, self.device, what)

    def _plan(
        self, collective: str, op: str, dtype: torch.dtype | None, count: int, aligned: bool,
        algorithm: str | None, protocol: str | None,
    ) -> plan.Plan:  # fmt: skip
        capturing = not self.simulated and torch.cuda.is_current_stream_capturing()
        key = (collective, op, dtype, count, aligned, algorithm, protocol, capturing)
        try:
            return self._plans[key]
        except (KeyError, TypeError):
            return self._new_plan(*key)

    def _new_plan(
        self, collective: str, op: str, dtype: torch.dtype | None, count: int, aligned: bool,
        algorithm: str | None, protocol: str | None, capturing: bool,
    ) -> plan.Plan:  # fmt: skip
        if not isinstance(algorithm, str | None) or not isinstance(protocol, str | None):
            raise InvalidArgument(f"algorithm={algorithm!r}, protocol={protocol!r}: names or None are needed")
        key = (collective, op, dtype, count, aligned, algorithm, protocol)
        nbytes = count * dtype.itemsize if dtype is not None else 0
        choice = selection.choose(self._site, collective, nbytes, algorithm, protocol)
        if capturing and (*key, False) not in self._plans:
            raise InvalidArgument(
                f"{collective}: run this call once before capture, so that its kernel is compiled and loaded"
            )
        bind = partial(self._runtime.bind, group=self._group, timeout=self._timeout)
        mode = "graph" if capturing else "eager"
        found = plan.make(self._site, choice, op, dtype, count, aligned, mode, bind)
        if len(self._plans) >= _MOST_PLANS:
            self._plans.pop(next(iter(self._plans)))
        self._plans[*key, capturing] = found
        return found

    def _run(
        self, collective: str, op: str, x: torch.Tensor, y: torch.Tensor, algorithm: str | None, protocol: str | None
    ) -> None:
        count = x.numel()
        aligned = (x.data_ptr() | y.data_ptr()) % 16 == 0
        aligned = aligned and (collective != "all_gather" or x.nbytes % 16 == 0)
        chosen = self._plan(collective, op, x.dtype, count, aligned, algorithm, protocol)
        if count:  # zero elements: nothing is launched and nothing is consumed, on any rank
            self._launch(chosen, x, y, count)

    def _finish(self, result: Any, async_op: bool) -> Any:
        if not async_op:
            return result
        event = None
        if self.device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
        return Work(self, result, event)


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
    began = time.monotonic()
    store, rank, world_size = open_store(url, rank, world_size, limit)
    left = max(0.1, limit - (time.monotonic() - began))
    return Communicator(store, rank, world_size, device, timeout, options, meeting_timeout=left)


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
    return torch.device("cpu") if found.type == "cpu" else found


def _index() -> int:
    """The current device; where nobody has chosen one, torchrun's LOCAL_RANK does."""
    index, local = torch.cuda.current_device(), env.integer("LOCAL_RANK")
    return local % torch.cuda.device_count() if index == 0 and local is not None else index
