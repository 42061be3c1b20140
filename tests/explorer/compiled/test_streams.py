"""Streams, events and graphs: the start of launches, and the order that the detector is given."""

from contextlib import contextmanager

import pytest

from tests.explorer.compiled.stub_executor import SetOrders, StubExecutor, gpu
from tricomm.errors import InvalidArgument
from tricomm.explorer.compiled.module_table import KernelLaunch


def launch(name, dependent=False):
    return KernelLaunch(0, name, b"", (1, 1, 1), (32, 1, 1), 0, 0, dependent=dependent)


@pytest.fixture
def device():
    executor, orders = StubExecutor(), SetOrders()
    made = gpu(executor, orders)
    made.executor, made.orders = executor, orders
    return made


def queues(device, number):
    return [device.driver.queue_of(device.new_stream().cuda_stream) for _ in range(number)]


def queued(device, *given):
    """A queue and its launches by name; a name with a * at its end is a dependent launch."""
    (queue,) = queues(device, 1)
    made = [launch(name.strip("*"), dependent=name.endswith("*")) for name in given]
    for each in made:
        queue.launch(each)
    return queue, *made


@contextmanager
def capture(device, stream):
    """Capture the launches in this block; yields a list to which the graph is appended."""
    graphs = []
    with stream:
        device.driver.cuStreamBeginCapture(stream.cuda_stream)
        yield graphs
        graphs.append(device.driver.cuStreamEndCapture(stream.cuda_stream)[1])


def names(launches):
    return [one.loaded for one in launches]


def test_a_stream_runs_one_kernel_at_a_time_each_ordered_after_the_last(device):
    (queue,) = queues(device, 1)
    one, two = launch("one"), launch("two")
    queue.launch(one)
    device.orders.known = {"host"}
    queue.launch(two)
    assert device.executor.started == [one] and one.after == frozenset()
    device.executor.end(one)
    assert device.executor.started == [two] and two.after == {one, "host"}


def test_an_event_orders_two_streams(device):
    first, second = queues(device, 2)
    one, two = launch("one"), launch("two")
    first.launch(one)
    mark = first.record()
    first.launch(launch("behind the event"))
    second.wait(mark)
    second.launch(two)
    assert device.executor.started == [one] and not mark.done
    device.executor.end(one)
    assert mark.done and two in device.executor.started and two.after == {one}


def test_recording_an_event_again_does_not_delay_waits_for_its_first_record(device):
    stream, other = device.new_stream(), device.new_stream()
    event = device.recorded(stream)
    event.wait(other)
    device.driver.queue_of(stream.cuda_stream).launch(launch("later"))
    event.record(stream)
    device.driver.queue_of(other.cuda_stream).launch(launch("beside"))
    assert names(device.executor.started) == ["later", "beside"] and not event._done()


def test_host_code_is_ordered_only_after_the_work_that_it_waits_for(device):
    (first, one), (_, two) = queued(device, "one"), queued(device, "two")
    device.executor.end(one)
    device.executor.end(two)
    device.finish([first])
    assert device.orders.known == {one}
    device.synchronize()
    assert device.orders.known == {one, two}


def test_a_kernels_error_ends_the_device(device):
    (first, one), (second, two) = queued(device, "one"), queued(device, "two")
    first.launch(launch("never"))
    device.executor.end(one, ValueError("out of bounds"))
    with pytest.raises(ValueError, match="out of bounds"):
        device.synchronize()
    with pytest.raises(ValueError, match="out of bounds"):
        second.launch(launch("neither"))
    assert device.executor.started == [two]


def test_a_graph_is_replayed_in_the_order_of_its_capture_next_to_other_streams(device):
    stream, side = device.new_stream(), device.new_stream()
    with capture(device, stream) as graphs:
        assert device.capturing()
        device.driver.queue_of(stream.cuda_stream).launch(launch("one"))
        side.wait_stream(stream)
        device.driver.queue_of(side.cuda_stream).launch(launch("left"))
        device.driver.queue_of(stream.cuda_stream).launch(launch("right"))
        stream.wait_stream(side)
        device.driver.queue_of(stream.cuda_stream).launch(launch("last"))
    assert device.executor.started == [] and not device.capturing()
    for _ in range(2):
        device.driver.cuGraphLaunch(graphs[0], stream.cuda_stream)
        beside = launch("beside")
        device.driver.queue_of(side.cuda_stream).launch(beside)
        assert names(device.executor.started) == ["one", "beside"]
        (one,) = [x for x in device.executor.started if x.loaded == "one"]
        device.executor.end(one)
        left, right = (x for x in device.executor.started if x is not beside)
        assert {left.loaded, right.loaded} == {"left", "right"} and one in left.after
        device.executor.end(right)
        assert "last" not in names(device.executor.started)
        device.executor.end(left)
        (last,) = [x for x in device.executor.started if x.loaded == "last"]
        assert {one, left, right} <= last.after and beside not in last.after
        device.executor.end(last)
        device.executor.end(beside)
    assert device.streams.idle


def test_a_capture_that_is_not_joined_is_refused(device):
    stream, side = device.new_stream(), device.new_stream()
    with stream:
        device.driver.cuStreamBeginCapture(stream.cuda_stream)
        side.wait_stream(stream)
        device.driver.queue_of(side.cuda_stream).launch(launch("lost"))
        with pytest.raises(InvalidArgument, match="has not been joined"):
            device.driver.cuStreamEndCapture(stream.cuda_stream)
    assert not device.streams.capturing


def test_waiting_for_a_stream_in_capture_is_refused(device):
    stream = device.new_stream()
    device.driver.cuStreamBeginCapture(stream.cuda_stream)
    with pytest.raises(InvalidArgument, match="being captured"):
        device.synchronize()
    with pytest.raises(InvalidArgument, match="outside of the capture"):
        stream.wait_event(device.recorded(device.new_stream()))


def test_nothing_waits_for_abandoned_work(device):
    queued(device, "one", "two")
    device.streams.abandon()
    device.synchronize()


def test_a_dependent_launch_begins_at_the_signal_and_is_ordered_after_the_accesses_before_it(device):
    _, one, two, three = queued(device, "one", "two*", "three")
    assert device.executor.started == [one]
    device.executor.signal(one, handed={"handed"})
    assert device.executor.started == [one, two] and two.before == (one,) and two.after == {"handed"}
    device.executor.end(one)
    assert device.executor.started == [two]  # the third is no dependent launch
    device.executor.end(two)
    assert device.executor.started == [three] and three.before == () and three.after == {one, two, "handed"}


def test_without_a_signal_a_dependent_launch_begins_at_the_end(device):
    _, one, two = queued(device, "one", "two*")
    device.executor.end(one)
    assert device.executor.started == [two] and two.before == (one,) and two.after == frozenset()


def test_events_between_launches_allow_overlap_and_complete_after_all_earlier_work(device):
    """CUDA does not specify it, so a dependent launch must not rely on either."""
    queue, other = queues(device, 2)
    elsewhere, one, two = launch("elsewhere"), launch("one"), launch("two", dependent=True)
    other.launch(elsewhere)
    awaited = other.record()
    queue.launch(one)
    first = queue.record()
    queue.wait(awaited)
    queue.launch(two)
    second = queue.record()
    device.executor.signal(one, handed={"handed"})
    assert device.executor.started == [elsewhere, one]
    device.executor.end(elsewhere)
    assert device.executor.started == [one, two]
    assert two.before == (one,) and two.after == {"handed", elsewhere} and not first.done
    device.executor.end(two)
    assert not first.done and not second.done and not queue.idle
    device.executor.end(one)
    assert first.order == {one} and second.order == {one, two, elsewhere, "handed"}
    assert first.done and second.done and queue.idle


def test_a_launch_after_one_that_does_not_wait_begins_after_all_earlier_ones(device):
    _, one, two, three, four = queued(device, "one", "two*", "three*", "four")
    device.executor.signal(one)
    device.executor.signal(two)
    device.executor.end(two)
    assert device.executor.started == [one, three] and three.before == (two,) and one not in three.after
    device.executor.end(three)
    assert device.executor.started == [one]
    device.executor.end(one)
    assert device.executor.started == [four] and {one, two, three} <= four.after


def test_only_edges_between_kernels_of_a_graph_are_programmatic(device):
    stream = device.new_stream()
    with capture(device, stream) as graphs:
        queue = device.driver.queue_of(stream.cuda_stream)
        queue.launch(launch("one"))
        queue.launch(launch("two", dependent=True))
        queue.capture.add(queue, None, lambda: None)
        queue.launch(launch("three", dependent=True))
    device.driver.cuGraphLaunch(graphs[0], stream.cuda_stream)
    (one,) = device.executor.started
    device.executor.signal(one, handed={"handed"})
    _, two = device.executor.started
    assert two.loaded == "two" and two.before == (one,) and "handed" in two.after and one not in two.after
    device.executor.end(one)
    device.executor.end(two)
    assert names(device.executor.started) == ["three"] and device.executor.started[0].before == ()


def test_each_edge_from_a_kernel_to_a_dependent_launch_may_be_programmatic(device):
    stream, side = device.new_stream(), device.new_stream()
    queue, beside = (device.driver.queue_of(each.cuda_stream) for each in (stream, side))
    with capture(device, stream) as graphs:
        side.wait_stream(stream)
        queue.launch(launch("left"))
        beside.launch(launch("right"))
        stream.wait_stream(side)
        queue.launch(launch("joined", dependent=True))
    for last in ("signal", "end"):
        device.driver.cuGraphLaunch(graphs[0], stream.cuda_stream)
        left, right = device.executor.started
        device.executor.signal(left, handed={"handed"})
        assert device.executor.started == [left, right]
        getattr(device.executor, last)(right)
        joined = device.executor.started[-1]
        assert joined.loaded == "joined" and joined.before == (left, right)
        assert "handed" in joined.after and left not in joined.after and right not in joined.after
        for each in list(device.executor.started):
            device.executor.end(each)
