"""An executor that runs nothing: the test ends its kernels."""

from tricomm.explorer.compiled.driver import SimulatedDriver
from tricomm.explorer.compiled.module_table import KernelLaunch
from tricomm.explorer.compiled.simulated_gpu import SimulatedGpu
from tricomm.explorer.compiled.stream_queues import Streams


class StubExecutor:
    """`started` has the launches that run, in the order in which they began."""

    def __init__(self) -> None:
        self.started: list[KernelLaunch] = []
        self.ended: list[KernelLaunch] = []
        self._calls = {}

    def start(self, launch, ended, signalled) -> None:
        self.started.append(launch)
        self._calls[launch] = ended, signalled

    def signal(self, launch, handed=None) -> None:
        launch.signalled, launch.handed = True, handed
        self._calls[launch][1]()

    def end(self, launch, error=None) -> None:
        self.started.remove(launch)
        self.ended.append(launch)
        launch.end = {launch, *(launch.after or ())}
        self._calls.pop(launch)[0](error)


class SetOrders:
    """Tokens are sets of launches and names."""

    def __init__(self) -> None:
        self.known: set[object] = set()

    def host(self, rank):
        return frozenset(self.known)

    def learn(self, rank, token) -> None:
        self.known |= token or set()

    def join(self, one, other):
        return frozenset(one or ()) | frozenset(other or ())

    def operation(self, rank, after):
        from contextlib import nullcontext

        return nullcontext(lambda: frozenset({"operation", *(after or ())}))


class StubTurns:
    def __init__(self, pause) -> None:
        self.wait = self.give_way = pause

    def monotonic(self):
        return 0.0

    def sleep(self, seconds):
        self.wait()


def gpu(executor=None, orders=None, rank=0, capability=90, pause=lambda: None):
    streams = Streams(rank, executor or StubExecutor(), orders or SetOrders(), lambda: None)
    return SimulatedGpu(SimulatedDriver(streams, capability), StubTurns(pause))
