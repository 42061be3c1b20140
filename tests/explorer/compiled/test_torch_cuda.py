"""Host code over a simulated GPU: torch's own work is in the order of the streams, and `torch.cuda` is the GPU's."""

import threading

import pytest
import torch
from greenlet import getcurrent, greenlet

from tests.explorer.compiled.stub_executor import SetOrders, StubExecutor, gpu
from tests.explorer.compiled.test_streams import launch
from tricomm.explorer.compiled.torch_cuda import installed
from tricomm.explorer.memory_model.regions import Memory
from tricomm.explorer.world.host_state import Hosts


@pytest.fixture
def device():
    """Kernels end when host code waits, the last to begin first; `seen` has those that had ended at each wait."""
    executor, orders = StubExecutor(), SetOrders()

    def pause():
        executor.end(executor.started[-1])

    made = gpu(executor, orders, pause=pause)
    made.executor, made.orders = executor, orders
    with installed(lambda: made):
        yield made


def queue(device):
    return device.driver.queue_of(torch.cuda.current_stream().cuda_stream)


def test_an_operation_waits_for_its_own_stream_only(device):
    x = torch.zeros(4)
    side, other = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        queue(device).launch(launch("side"))
    with torch.cuda.stream(other):
        x.add_(1)
        assert [one.loaded for one in device.executor.started] == ["side"]
    with torch.cuda.stream(side):
        x.view(2, 2), x.data_ptr(), x.shape
        assert [one.loaded for one in device.executor.started] == ["side"], "a view looks at no element"
        x.add_(1)
    assert device.executor.started == [] and x.tolist() == [2.0] * 4


def test_later_work_of_a_stream_is_ordered_after_an_operation_and_host_code_is_not(device):
    x = torch.zeros(4)
    queue(device).launch(one := launch("one"))
    x.add_(1)
    queue(device).launch(two := launch("two"))
    assert one in two.after and "operation" in two.after and device.orders.known == set()
    device.executor.end(two)
    assert x.sum().item() == 4.0 and one in device.orders.known


def test_a_value_on_the_host_waits(device):
    x = torch.ones(2)
    for read in (x.tolist, lambda: float(x[0]), lambda: x.numpy().sum(), lambda: bool(x[0]), x.cpu):
        queue(device).launch(launch("one"))
        read()
        assert device.executor.started == []


def test_a_captured_operation_is_repeated_by_every_replay_and_changes_nothing_before(device):
    x, side = torch.ones(4), torch.cuda.Stream()
    y = x * 2
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        x.add_(1)
        z = x + y
    assert x.tolist() == [1.0] * 4
    for replay in (1, 2, 3):
        graph.replay()
        torch.cuda.synchronize()
        assert x.tolist() == [1.0 + replay] * 4 and z.tolist() == [3.0 + replay] * 4


def test_events_and_streams_of_torch_cuda_are_the_simulated_ones(device):
    side = torch.cuda.Stream()
    event = torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(side):
        assert torch.cuda.current_stream() == side and not torch.cuda.is_current_stream_capturing()
        queue(device).launch(launch("one"))
        event.record()
    assert torch.cuda.current_stream() == torch.cuda.default_stream() != side
    torch.cuda.current_stream().wait_event(event)
    torch.cuda.default_stream().synchronize()
    assert event.query() and side.query()


def test_two_ranks_wait_in_the_middle_of_an_operation_and_torch_is_as_it_was():
    """While a rank waits in an operation, the other rank's host code runs and begins another operation."""
    main, order = getcurrent(), []
    devices, hosts = {}, {}
    for rank in (0, 1):
        executor = StubExecutor()
        devices[rank] = gpu(executor, rank=rank, pause=main.switch)
        devices[rank].executor = executor

    def body(rank):
        devices[rank].driver.queue_of(0).launch(launch(rank))
        x = torch.ones(2, requires_grad=True)
        y = x * (rank + 1)
        order.append(rank)
        y.sum().backward()
        assert x.grad.tolist() == [rank + 1.0] * 2

    def current():
        return next((devices[rank] for rank, host in hosts.items() if host is getcurrent()), None)

    hosts.update({rank: greenlet(lambda rank=rank: body(rank)) for rank in (0, 1)})
    states = Hosts(0, 2, Memory())

    def run(rank):
        with states.of(rank):
            hosts[rank].switch()

    with installed(current):
        run(0)
        run(1)
        devices[1].executor.end(devices[1].executor.started[0])
        devices[0].executor.end(devices[0].executor.started[0])
        run(0)
        run(1)
        assert all(host.dead for host in hosts.values()) and order == [0, 1]
        assert len(torch.overrides._get_current_function_mode_stack()) == 1
    assert not torch.overrides._get_current_function_mode_stack()
    assert torch.cuda.Stream.__module__.startswith("torch")


def test_executions_in_two_threads_have_each_their_own_gpu_and_leave_torch_as_it_was():
    before = {name: getattr(torch.cuda, name) for name in ("Stream", "Event", "synchronize", "current_stream")}
    first, second = gpu(StubExecutor(), SetOrders()), gpu(StubExecutor(), SetOrders())
    inside, leave = threading.Event(), threading.Event()
    others = []

    def other():
        with installed(lambda: second):
            inside.set()
            others.append(torch.cuda.current_stream() == second.stream())
            leave.wait(30)
        others.append(torch.cuda.current_stream is before["current_stream"])

    thread = threading.Thread(target=other)
    with installed(lambda: first):
        thread.start()
        assert inside.wait(30)
        assert torch.cuda.current_stream() == first.stream()
    # The other execution is still running: torch's functions are restored when it ends, and not before.
    assert torch.cuda.current_stream is not before["current_stream"]
    leave.set()
    thread.join(30)
    assert others == [True, True]
    assert {name: getattr(torch.cuda, name) for name in before} == before
