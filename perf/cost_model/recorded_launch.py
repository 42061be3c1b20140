"""A launch of a shipped kernel as a GPU would get it: the launch path, over a driver that only notes it.

So the model executes what is launched, with its parameters, whatever these are.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from tricomm.explorer.compiled.driver import SimulatedDriver
from tricomm.explorer.compiled.module_table import DeviceFunction, table_of
from tricomm.explorer.compiled.stream_queues import Ended, KernelLaunch, NoOrders, Streams
from tricomm.kernels.launch import cubin, cuda_launcher
from tricomm.kernels.launch.compiler import ptx_of


class Recorder:
    """An executor whose kernels have ended as soon as they begin."""

    def __init__(self) -> None:
        self.launches: list[KernelLaunch] = []

    def start(self, launch: KernelLaunch, ended: Ended) -> None:
        self.launches.append(launch)
        ended(None)


class RecordingGpu:
    """A GPU of `capability` (90 for sm_90) that notes what it is to launch."""

    def __init__(self, capability: int) -> None:
        self._recorder = Recorder()
        self._driver = SimulatedDriver(Streams(0, self._recorder, NoOrders(), lambda: None), capability)

    def launched(
        self, kernel: Any, blocks: int, constexprs: dict[str, Any], bits: int | None, more: list[Any],
        group: tuple[Any, ...], arguments: tuple[Any, ...],
    ) -> KernelLaunch:  # fmt: skip
        """The launch that `make_launcher` makes of a kernel with aligned tensors; raises what that raises.

        `arguments` are those of its `run`.
        """
        launch = cuda_launcher.make_launcher(kernel, blocks, constexprs, bits, True, more, group, self._driver)
        launch(*arguments)
        return self._recorder.launches.pop()

    def machine_instructions(self, loaded: DeviceFunction) -> int | None:
        """How many the machine code of a function has."""
        for image in table_of(self._driver.name).modules:
            if ptx_of(image) == loaded.text:
                return cubin.instructions(image, loaded.name)
        return None


@cache
def gpu(architecture: str) -> RecordingGpu:
    """Of "sm_90"; one a process, because what a device has loaded stays loaded."""
    return RecordingGpu(int(architecture.removeprefix("sm_")))
