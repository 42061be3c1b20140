"""Records the launch of a shipped kernel as a GPU would get it: the launch path runs over a driver that only records.

So the model executes exactly what is launched, with the same parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from tricomm.explorer.compiled.driver import SimulatedDriver
from tricomm.explorer.compiled.module_table import DeviceFunction, KernelLaunch, table_of
from tricomm.explorer.compiled.stream_queues import Ended, NoOrders, Streams
from tricomm.kernels.launch import cubin, cuda_launcher
from tricomm.kernels.launch.compiler import ptx_of


class Recorder:
    """An executor that records launches, and ends each launch at once."""

    def __init__(self) -> None:
        self.launches: list[KernelLaunch] = []

    def start(self, launch: KernelLaunch, ended: Ended, signalled: Callable[[], None]) -> None:
        self.launches.append(launch)
        ended(None)


class RecordingGpu:
    """A GPU of `capability` (90 for sm_90) that records its launches."""

    def __init__(self, capability: int) -> None:
        self._recorder = Recorder()
        self._driver = SimulatedDriver(Streams(0, self._recorder, NoOrders(), lambda: None), capability)

    def launched(
        self,
        kernel: Any,
        blocks: int,
        constexprs: dict[str, Any],
        bits: int | None,
        more: list[Any],
        group: tuple[Any, ...],
        arguments: tuple[Any, ...],
    ) -> KernelLaunch:
        """The launch that `make_launcher` makes of a kernel with aligned tensors. Raises what `make_launcher` raises.

        `arguments` are passed to its `run`.
        """
        launch = cuda_launcher.make_launcher(kernel, blocks, constexprs, bits, True, more, group, self._driver)
        launch(*arguments)
        return self._recorder.launches.pop()

    def machine_instructions(self, loaded: DeviceFunction) -> int | None:
        """The number of instructions in a function's machine code; None if it is not known."""
        for image in table_of(self._driver.name).modules:
            if ptx_of(image) == loaded.text:
                return cubin.instructions(image, loaded.name)
        return None


@cache
def gpu(architecture: str) -> RecordingGpu:
    """The GPU of an architecture ("sm_90"). One per process, because a device never unloads a module."""
    return RecordingGpu(int(architecture.removeprefix("sm_")))
