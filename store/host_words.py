"""Host memory that kernels use. Its registration with the GPU must end before the memory is unmapped.

CUDA registers memory by its address. If memory is unmapped while it is registered, the driver keeps its pages: other
memory that is mapped at that address later looks registered already, and kernels would write to the old pages. So a
registration belongs to one `HostWords`, which its owner closes before it unmaps the memory. While it is registered,
this module refers to the memory, so that its address cannot be reused even if its owner is gone.

If all kernels of a group have ended when it closes, its control page is unmapped, even if its arena stays because a
peer has not yet received a message. If a kernel does not end, or a captured graph may run one again, all memory that it
may access (page, arena, tables) stays mapped until the process ends.
"""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import dataclass

from tricomm.errors import GroupAborted, ResourceError
from tricomm.store.cuda.cuda_driver import PAGE_BYTES, Driver
from tricomm.store.segments import map_again

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Registration:
    memory: object
    driver: Driver
    ordinal: int
    context: int
    process: int
    device_address: int = 0


_registered: set[_Registration] = set()


class HostWords:
    """The page of host memory at `address`, which stays mapped as long as there is a reference to `memory`."""

    def __init__(self, memory: object, address: int) -> None:
        self.address = address
        self._memory: object | None = memory
        self._registration: _Registration | None = None
        self._lock = threading.RLock()  # reentrant, because a signal handler may close while this thread opens

    def on_device(self, driver: Driver, ordinal: int) -> int:
        """The page's address for kernels of GPU `ordinal`, valid until `close`; the same in every call.

        Raises `ResourceError` if CUDA refuses to register it, and for a second GPU; `GroupAborted` after `close`.
        """
        with self._lock:
            if self._memory is None:
                raise GroupAborted("the host memory of this group is closed; make a new communicator")
            if self._registration is None:
                self._registration = self._register(self._memory, driver, ordinal)
            elif self._registration.ordinal != ordinal:
                raise ResourceError(
                    f"the group's control page is registered for GPU {self._registration.ordinal} and cannot be used "
                    f"on GPU {ordinal} too: a communicator has one GPU per rank"
                )
            return self._registration.device_address

    def follow(self, source: int) -> HostWords:
        """Map the shared memory at `source` at this page's address, in place of its memory. Returns the page.

        No kernel may use the page. Raises `ResourceError` if the GPU or the system refuses it; it can be called again.
        """
        with self._lock:
            if (memory := self._memory) is None:
                raise GroupAborted("the host memory of this group is closed; make a new communicator")
            held = self._registration
            if held is not None:
                _unregister(held, self.address)
                if held in _registered:
                    raise ResourceError("the GPU still knows this group's control words, so they cannot be replaced")
                self._registration = None
            map_again(source, PAGE_BYTES, self.address)
        return HostWords(memory, self.address)

    def close(self) -> None:
        """Unregister the page and release the memory. Idempotent; a forked child only drops its references.

        No kernel may still use it. If CUDA refuses, the memory stays mapped until the process ends, with a warning.
        """
        held = self._registration
        if held is not None and held.process != os.getpid():
            _registered.discard(held)
            self._memory = self._registration = None
            return
        with self._lock:
            self._memory = None
            if self._registration is not None:
                _unregister(self._registration, self.address)
                self._registration = None

    def _register(self, memory: object, driver: Driver, ordinal: int) -> _Registration:
        # Retain the context, because a registration ends with its context.
        context = driver.retain_context(ordinal)
        registration = _Registration(memory, driver, ordinal, context, os.getpid())
        try:
            with driver.current(context):
                _registered.add(registration)
                registration.device_address = driver.host_register(self.address, PAGE_BYTES)
        except ResourceError:
            if registration.device_address:  # the registration succeeded, and a later call failed
                _unregister(registration, self.address)
                self._registration = registration if registration in _registered else None
            else:
                _registered.discard(registration)
                driver.release_context(ordinal)
            raise
        return registration


def _unregister(held: _Registration, address: int) -> None:
    try:
        with held.driver.current(held.context):
            held.driver.host_unregister(address)
        _registered.discard(held)
        held.driver.release_context(held.ordinal)
    except ResourceError as error:
        if held in _registered:
            _log.warning(f"a page that the GPU may still know stays mapped until this process ends: {error}")
        else:
            _log.warning(f"releasing GPU memory: {error}")
