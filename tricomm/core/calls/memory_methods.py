"""Messages, symmetric memory, users' kernels and the suspension of a communicator: its public methods."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal

import torch

from tricomm import arguments
from tricomm.core.calls.collectives import Tensor
from tricomm.core.calls.point_to_point import PointToPoint
from tricomm.core.entry_guard import guarded
from tricomm.core.faults import Faults
from tricomm.core.group import Group
from tricomm.core.launcher import Launcher
from tricomm.core.symmetric import HandleName, Symmetric, check_shape
from tricomm.core.watch.monitor import Monitor
from tricomm.core.work import or_work
from tricomm.deadline import Deadline
from tricomm.errors import InvalidArgument, ResourceError
from tricomm.kernels.launch import triton_adapter
from tricomm.store.arenas.arena import Arena
from tricomm.store.collective_stages import CollectiveStages

log = logging.getLogger("tricomm")


def _quietly_suspend(arena: Arena) -> None:
    try:
        arena.suspend()
    except ResourceError as error:  # another error is being raised
        log.warning("giving memory back after a resume that was refused: %s", error)


_ALIGNMENT = 16


class MemoryMethods:
    """Calls that need memory shared by the ranks."""

    _group: Group
    _faults: Faults
    _launcher: Launcher
    _monitor: Monitor
    _messages: PointToPoint

    @or_work
    @guarded
    def send(
        self, x: Tensor, dst: int, tag: int = 0, *, protocol: str | None = None, async_op: Literal[False] = False
    ) -> None:
        """Send `x` to rank `dst`, whose `recv` has the same number of elements, dtype and tag. Returns None.

        Up to four short messages of a tag complete even if the receiver has not called `recv` yet. A message that finds
        no free slot completes only when it is received, so two ranks that send each other more than that must not both
        send first. On a GPU the message is enqueued on the current stream, and later calls wait for its end.

        Raises `InvalidArgument` for a rank that does not exist or is this one, a tag that is not from 0 to 2^32 - 1,
        and while a CUDA graph is captured.
        """
        return self._messages.send(x, dst, tag, protocol=protocol, async_op=async_op)

    @or_work
    @guarded
    def recv(
        self,
        x: Tensor,
        src: int | None = None,
        tag: int = 0,
        *,
        protocol: str | None = None,
        async_op: Literal[False] = False,
    ) -> int:
        """Receive into `x` a message with this `tag` from rank `src` (None: any rank). Returns the source's rank.

        Messages of one rank and one tag arrive in the order in which they were sent. A message with another tag may be
        received first if the messages before it fit into the slots of the pair. With `src=None`, ranks are checked in
        ascending order, and on a GPU the host waits for the source; with `async_op=True` the `Work` returns it.

        Raises `InvalidArgument` as `send` does; `CollectiveMismatch` if the message has this tag and another dtype or
        size, or if messages with other tags leave no room for more; `CollectiveTimeout` that names what is pending.
        """
        return self._messages.recv(x, src, tag, protocol=protocol, async_op=async_op)

    @guarded
    def symmetric(self, shape: Sequence[int], dtype: torch.dtype, *, multicast: bool = True) -> Symmetric:
        """Allocate memory of `shape` and `dtype` on every rank that every peer can reach. Collective, with the same
        arguments.

        `multicast`: with a multicast address, if that is possible and this communicator's arena has one; otherwise
        `Symmetric.no_multicast` gives the reason.

        Raises `InvalidArgument` on all ranks if an argument is bad or differs between ranks (the group stays usable),
        `ResourceError` if memory is refused anywhere.
        """
        group = self._group
        sizes, error = check_shape(shape, dtype)
        with self._handle(
            "symmetric", error, lambda: repr((sizes, dtype)) + ", multicast=False" * (not multicast)
        ) as name:
            wanted = bool(multicast) and group.arena.multicast != 0
            arena = group.runtime.symmetric(group.control, sizes, dtype, group.device, group.timeout, wanted)
            group.owned[name.number] = arena
            made = Symmetric(arena, name, sizes, dtype, released=partial(group.owned.pop, name.number, None))
            if not wanted:
                made.no_multicast = group.arena.no_multicast if multicast else "it was made with multicast=False"
        return made

    @guarded
    def register(self, tensor: torch.Tensor, group: Any = None) -> Symmetric:
        """Make a handle of every rank's `tensor`, which collectives then read and write in place.

        Collective: a contiguous tensor of the same shape and dtype on all ranks, at an address that is a multiple of 16
        bytes. On GPUs CUDA has to be able to share its memory: torch's expandable segments and symmetric memory by
        descriptors, torch's usual segments by legacy CUDA IPC. With `group`, a process group of the same ranks, it has
        to be torch's symmetric memory; torch's own mappings are used, including its multicast address if all ranks have
        one (`Symmetric.no_multicast` says why not). On a CPU it has to be in torch's shared memory (`share_memory_()`).
        The tensor is kept alive until `handle.close()` (by all ranks) or the communicator's end. Peers can reach the
        whole allocation of which it is a part.

        Raises on all ranks, and the group stays usable: `InvalidArgument` if a rank passes a tensor that cannot be
        registered, if the tensors differ, or if they begin at different offsets of torch's memory; `ResourceError` for
        memory that cannot be shared. Such a tensor can still be passed to collectives, which stage it.
        """
        own, where = self._group, " in torch's symmetric memory" * (group is not None)
        error = _registrable(tensor, own.device)
        with self._handle("register", error, lambda: f"{tensor.dtype} of shape {list(tensor.shape)}{where}") as name:
            try:
                arena = own.runtime.register(own.control, tensor, own.timeout, group, own.arena.no_multicast)
            except ResourceError as refusal:
                own.unregistered = str(refusal)
                raise
            own.registered[name.number] = arena, tensor.detach()
            released = partial(own.registered.pop, name.number, None)
            return Symmetric(arena, name, tuple(tensor.shape), tensor.dtype, tensor, released)

    @contextmanager
    def _handle(self, what: str, error: InvalidArgument | None, said: Callable[[], str]) -> Iterator[HandleName]:
        """The name of a handle that all ranks make together. Raises on all ranks if one has an `error`, or if `said()`
        differs between them."""
        group = self._group
        self._faults.check_usable()
        if group.runtime.no_symmetric is not None or not group.reachable:
            why = group.routes.no_memory or "not every rank reaches every other one's memory on these GPUs' links"
            raise InvalidArgument(f"{what}: {group.runtime.no_symmetric or why}")
        with self._launcher.held(), self._faults.abort_on_error(what):
            error = error or group.captured(what)
            value = said() if error is None else ""
            group.control.require_equal(value, what, group.timeout, abort_on_fault=True, error=error)
            yield HandleName(group.name, group.handles + 1, group.rank)
            group.handles += 1

    @guarded
    def launch(self, kernel: Any, grid: Any, *args: Any, **constexprs: Any) -> None:
        """Run a user's `@triton.jit` kernel on the device of this communicator's tensors.

        Positional arguments are runtime values (tensors, tuples of tensors, numbers), keywords constexprs and launch
        options. `grid` is a number, a tuple of up to three, or a function of the constexprs. On a CPU the kernel is
        interpreted and has run on return; when a peer is gone or the time is up, it is ended at its next access or
        branch, and this call raises the fault. On a GPU the next call or `synchronize()` raises it, and only waits by
        `primitives` end: a kernel that polls by its own loads runs until the process ends.

        Raises `InvalidArgument` before anything runs for a kernel, grid or arguments that do not fit.
        """
        group, launcher = self._group, self._launcher
        self._faults.check_usable()
        if not triton_adapter.is_kernel(kernel):
            raise InvalidArgument(f"launch: a plain @triton.jit kernel is needed, found {type(kernel).__name__}")
        device, limit = group.device, group.timeout
        run = group.runtime.prepare(kernel, grid, args, constexprs, device, limit, self._faults.check)
        launcher.captured |= group.gpu is not None and group.gpu.capturing()
        with launcher.held(), self._monitor.in_flight.user_call(group.gpu, kernel.__name__):
            launcher.run(run)

    # Suspension: the monitor continues, because the control page is not freed
    #
    #   awake ── suspend: no call in flight on any rank, all free their memory ──▶ asleep
    #   asleep ── resume: new memory, zeroed, at the same addresses, initialised as at first ──▶ awake
    #
    # Both have stages: after each of them all ranks go on, or none. A suspend that is refused leaves the group awake, a
    # resume that is refused leaves it asleep.

    @guarded
    def suspend(self) -> None:
        """Free this communicator's device memory on all ranks, and keep its addresses.

        Collective: one thread of each rank calls it, when all ranks have made the same calls. Waits for calls in
        flight, for this communicator's timeout at most. Captured graphs, plans and symmetric handles stay valid, and
        work again after `resume`; the contents of symmetric memory are lost. Until then every call is refused without
        consuming a sequence number, except `resume`, `close` and calls that ask no other rank. No graph with a call of
        this communicator may be replayed, because its kernels would access unmapped addresses. If a rank dies
        meanwhile, the others get `PeerDied` as usual. NCCL keeps its memory.

        Raises on all ranks, and the group stays in use: `InvalidArgument` if a rank is suspended already, captures a
        graph, has sent messages that were not received, or has closed other symmetric handles than the other ranks, and
        for memory that cannot be mapped again at its addresses (cuda_ipc); `ResourceError` if memory cannot be freed,
        and then the contents of symmetric memory are lost all the same. `CollectiveMismatch`, with the group lost, if
        another rank is in a call that this one has not made.
        """
        group, control = self._group, self._group.control
        self._faults.check_usable()
        with self._launcher.held(while_suspended=False), self._faults.abort_on_error("suspend"):
            control.agree(self._why_not_suspend(), "suspend", group.timeout, abort_on_fault=True)
            self._launcher.wait(group.timeout)
            control.agree(None, "suspend: calls in flight", group.timeout, abort_on_fault=True)
            self._require_same_handles("suspend", self._unread())
            self._sleep(True)
            stage = CollectiveStages(control, "suspend", Deadline(group.timeout))
            try:
                stage("give memory back", self._give_back)
            except ResourceError as error:
                self._wake_after(error)

    @guarded
    def resume(self) -> None:
        """Allocate zeroed memory at the addresses that `suspend` has kept, on all ranks, so that calls are possible
        again.

        Collective, by one thread of each rank. Raises on all ranks, and the group stays suspended, so that it can be
        tried again: `InvalidArgument` if it is not suspended, or if symmetric handles were closed meanwhile on some
        ranks only; `ResourceError` if memory is refused.
        """
        group = self._group
        if not group.suspended or group.closed:
            self._faults.check_usable()
            raise InvalidArgument(f"{group}: not suspended, so there is nothing to resume; suspend() comes first")
        self._faults.check()
        with self._launcher.held(while_suspended=True), self._faults.abort_on_error("resume"):
            self._require_same_handles("resume", group.captured("resume"))
            self._take_again()

    def _why_not_suspend(self) -> InvalidArgument | None:
        group = self._group
        for arena in group.live_arenas().values():
            if arena.no_suspend:
                return InvalidArgument(f"suspend: {arena.no_suspend}")
        return group.captured("suspend")

    def _unread(self) -> InvalidArgument | None:
        ranks = self._messages.unread() if self._group.arena.nbytes else []  # only the kernels' memory holds messages
        text = (
            f"rank(s) {ranks} have not received all that this rank has sent, and suspend would lose it: receive first"
        )
        return InvalidArgument(text) if ranks else None

    def _require_same_handles(self, what: str, error: InvalidArgument | None) -> None:
        """Raises on all ranks if one has an `error`, or other handles than the other ranks."""
        group = self._group
        numbers = [number for number in group.live_arenas() if number]
        said = f"symmetric handles {numbers} open" if numbers else "no symmetric handle open"
        group.control.require_equal(said, what, group.timeout, abort_on_fault=True, error=error)

    def _sleep(self, suspended: bool) -> None:
        self._group.sleep(suspended)
        self._monitor.suspended = suspended

    def _fall_asleep(self) -> None:
        """Suspend a group that has just been made."""
        self._sleep(True)
        stage = CollectiveStages(self._group.control, "suspend", Deadline(self._group.timeout))
        stage("give memory back", self._give_back)

    def _give_back(self) -> None:
        failures = []
        for arena in self._group.live_arenas().values():
            try:
                arena.suspend()
            except ResourceError as error:  # the others are still suspended
                failures.append(error)
        if failures:
            raise failures[0]

    def _take_again(self) -> None:
        group = self._group
        deadline = Deadline(group.timeout)
        with ExitStack() as undo:
            for arena in group.live_arenas().values():
                arena.resume(group.control, deadline.left)
                undo.callback(_quietly_suspend, arena)
            CollectiveStages(group.control, "resume", deadline)("begin", group.begin)
            undo.pop_all()
        self._sleep(False)

    def _wake_after(self, error: ResourceError) -> None:
        try:
            self._take_again()
        except ResourceError as second:
            raise ResourceError(
                f"{error}; and memory cannot be taken again: {second}. The group is suspended; try resume() later"
            ) from error
        raise ResourceError(f"{error}. The group is not suspended, and its symmetric memory is zeroed") from error


def _registrable(x: Any, device: torch.device) -> InvalidArgument | None:
    """The reason why a tensor cannot be registered, apart from its kind of memory; None if it can."""
    try:
        arguments.check_tensor(x, device, "register")
    except InvalidArgument as error:
        return error
    if not x.is_contiguous() or not x.numel():
        return InvalidArgument(f"register: shape {tuple(x.shape)}: a contiguous tensor with elements is needed")
    if x.data_ptr() % _ALIGNMENT:
        return InvalidArgument(
            f"register: the tensor begins {x.data_ptr() % _ALIGNMENT} bytes past a multiple of {_ALIGNMENT}, at which "
            "kernels read: register the whole tensor of which it is a part"
        )
    return None
