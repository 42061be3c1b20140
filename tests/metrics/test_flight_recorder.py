"""The flight recorder alone: what is kept, when it dumps and where, and what cannot go wrong."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch

import tricomm
from devtools.null_launch import communicator as null_communicator
from tests.metrics.test_flight_analysis import analysed, loaded
from tricomm.core.watch import call_states
from tricomm.errors import InvalidArgument, ResourceError
from tricomm.kernels import collective_specs, layout
from tricomm.kernels.collectives import registry
from tricomm.metrics import flight_recorder
from tricomm.metrics.flight_document import COALESCED, ENDED, STARTED, Made, begun, full
from tricomm.metrics.flight_recorder import FlightRecorder
from tricomm.store import files
from tricomm.store.control import Descriptor


@pytest.fixture
def recorder(monkeypatch, tmp_path):
    """Makes recorders of two ranks' groups, alone in this process."""
    monkeypatch.setattr(flight_recorder, "_open", type(flight_recorder._open)())
    monkeypatch.setattr(flight_recorder, "_closed", type(flight_recorder._closed)(maxlen=2))
    monkeypatch.setattr(flight_recorder, "_warned", set())
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", f"{tmp_path}/rank_")
    return lambda calls=None: FlightRecorder("g", (0, 1), 0, 9.0, calls)


def barrier_at(recorder, number):
    recorder.add(begun(number, Made("barrier", "none", None, 0, -1)))


def numbers(path):
    return [call["collective_seq_id"] for call in loaded(path)["entries"]]


def test_the_last_calls_are_kept_and_ranks_that_are_apart_begin_with_the_same(recorder, tmp_path):
    starts = []
    for calls in (8, 9, 30, 31, 32, 33):
        made = recorder(8)
        for number in range(1, calls + 1):
            barrier_at(made, number)
        (path,) = flight_recorder.dump()
        kept = numbers(path)
        assert kept == list(range(kept[0], calls + 1)) and len(kept) >= 8
        starts.append(kept[0])
        del made
    assert starts == [1, 1, 22, 22, 24, 24]


@pytest.mark.parametrize(("value", "calls"), [("3", 3), ("many", 2000), ("0", 0), ("-1", 0), ("99999999999", 2000)])
def test_nonsense_as_a_size_is_one_warning(value, calls, recorder, monkeypatch, caplog):
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", value)
    made = [recorder(), recorder()]
    assert [(r.on, r._kept) for r in made] == [(calls > 0, calls)] * 2
    assert len(caplog.records) == (calls == 2000)
    if not calls:
        with pytest.raises(InvalidArgument, match="TORCH_FR_BUFFER_SIZE=0"):
            flight_recorder.dump()


def test_older_names_of_the_variables_count(recorder, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "5")
    monkeypatch.delenv("TORCH_FR_DUMP_TEMP_FILE")
    monkeypatch.setenv("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", f"{tmp_path}/old_")
    made = recorder()
    assert made._kept == 5 and flight_recorder.dump() == [tmp_path / "old_0"]
    monkeypatch.delenv("TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
    monkeypatch.setenv("XDG_CACHE_HOME", f"{tmp_path}/cache")
    assert flight_recorder.dump() == [tmp_path / "cache" / "torch" / "comm_lib_trace_rank_0"]


def test_a_folder_that_cannot_be_written_is_an_error_of_dump_and_one_warning_of_a_fault(
    recorder, monkeypatch, tmp_path, caplog
):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", f"{tmp_path}/file/rank_")
    made = [recorder(), recorder()]
    with pytest.raises(ResourceError, match="TORCH_FR_DUMP_TEMP_FILE, or dump"):
        flight_recorder.dump()
    with pytest.raises(ResourceError, match="null"):
        flight_recorder.dump("a\0b")
    assert [r.report() for r in made] == ["", ""] and len(caplog.records) == 1
    assert made[0].report(again=True) == "" and flight_recorder.dump(tmp_path) == [tmp_path / "comm_lib_trace_rank_0"]


def test_a_write_that_fails_half_way_leaves_the_older_dump(recorder, monkeypatch, tmp_path):
    made = recorder()
    (path,) = flight_recorder.dump()
    before = path.read_bytes()
    barrier_at(made, 1)

    def fail(old, new):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(ResourceError, match="No space left"):
        flight_recorder.dump()
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("value", "dumps"), [("0", False), ("false", False), ("1", True), ("nonsense", True)])
def test_torch_says_whether_a_fault_dumps(value, dumps, recorder, monkeypatch, caplog, tmp_path):
    monkeypatch.setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", value)
    made = recorder()
    error = tricomm.PeerDied("rank 1 died.")
    made.name_in(error)
    assert str(error) == ("rank 1 died." + f" Last calls: {tmp_path}/rank_0." * dumps)
    assert (tmp_path / "rank_0").exists() == dumps and len(caplog.records) == (value == "nonsense")
    other = InvalidArgument("no fault")
    made.name_in(other)
    assert str(other) == "no fault"


def test_stacks_are_kept_if_asked_for(recorder, monkeypatch):
    assert "frames" not in _only_call(recorder())
    monkeypatch.setenv("TORCH_INCLUDE_STACK_TRACE", "1")
    frames = _only_call(recorder())["frames"]
    assert any(f["name"] == "_only_call" and f["filename"] == __file__ and f["line"] > 0 for f in frames)


def _only_call(made):
    barrier_at(made, 1)
    (call,) = loaded(flight_recorder.dump()[0])["entries"][-1:]
    made.close()
    flight_recorder._closed.clear()
    return call


def test_a_forked_child_has_no_calls_and_leaves_the_file_alone(recorder):
    made = recorder()
    barrier_at(made, 1)
    (path,) = flight_recorder.dump()
    child = os.fork()
    if child == 0:
        made.report(again=True)
        try:
            flight_recorder.dump()
        except InvalidArgument:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7 and numbers(path) == [1]


def test_a_dump_in_the_middle_of_a_dump_and_in_threads(recorder, monkeypatch):
    made = recorder(50)
    for number in range(1, 60):
        barrier_at(made, number)
    write, inside = files.replace, []

    def replace(path, content):
        if not inside:
            inside.append(None)
            flight_recorder.dump()  # as a signal's handler may
        write(path, content)

    monkeypatch.setattr(flight_recorder.files, "replace", replace)
    threads = [threading.Thread(target=flight_recorder.dump) for _ in range(4)]
    for thread in threads:
        thread.start()
    for number in range(60, 400):
        barrier_at(made, number)
    for thread in threads:
        thread.join(20)
    assert numbers(flight_recorder.dump()[0])[-1] == 399


def test_a_closed_group_is_still_dumped_until_there_is_another_of_its_name(recorder):
    made = recorder()
    barrier_at(made, 1)
    made.close()
    del made
    assert numbers(flight_recorder.dump()[0]) == [1]
    again = recorder()
    assert numbers(flight_recorder.dump()[0]) == [] and again.on


def _apart(folder, *calls, messages=0):
    """The calls in which the analyser finds fault with two ranks that have made so many, of which 40 are kept; each is
    followed by `messages`."""
    for rank, last in enumerate(calls):
        made = FlightRecorder("g", (0, 1), rank, 9.0, 40)
        for number in range(1, last + 1):
            barrier_at(made, number)
            for _ in range(messages):
                made.add(begun(number, Made("recv" if rank else "send", "tag 0", torch.float32, 8, 1 - rank)))
        flight_recorder.dump(folder)
        made.close()
    return sorted({found.collective_seq_id for found in analysed(folder, "--prefix", "comm_lib_trace_rank_")})


@pytest.mark.parametrize(("calls", "messages"), [((130, 133), 0), ((129, 131), 1)])
@pytest.mark.usefixtures("recorder")
def test_ranks_that_are_apart_differ_in_their_last_calls_alone(calls, messages, tmp_path):
    assert _apart(tmp_path, *calls, messages=messages) == list(range(calls[0] + 1, calls[1] + 1))


@pytest.mark.usefixtures("recorder")
def test_without_a_common_start_the_analyser_blames_a_rank_for_the_first_calls(tmp_path, monkeypatch):
    monkeypatch.setattr(FlightRecorder, "first", lambda self, numbers: 0)
    assert _apart(tmp_path, 130, 133)[0] < 130


SIGNALLED = """
import os, signal, sys, time
from tricomm.metrics import flight_recorder
{before}
recorder = flight_recorder.FlightRecorder("g", (0,), 0, 1.0)
{after}
"""


def _signalled(tmp_path, before="", after="", name="USR2"):
    program = SIGNALLED.format(before=before, after=after)
    env = os.environ | {"TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/rank_", "TRICOMM_DUMP_SIGNAL": name}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_a_signal_dumps_while_the_main_thread_is_in_c(tmp_path):
    """Python's own handler does not run before the call into C ends."""
    after = """
import ctypes, threading
libc, mutex, taken = ctypes.CDLL(None), ctypes.create_string_buffer(64), threading.Event()
def look():
    libc.pthread_mutex_lock(mutex)
    taken.set()
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGUSR2)
    time.sleep(1.5)
    print(os.path.exists(os.environ["TORCH_FR_DUMP_TEMP_FILE"] + "0"), recorder_handled())
    libc.pthread_mutex_unlock(mutex)
recorder_handled = lambda: flight_recorder._listener._handled
looking = threading.Thread(target=look)
looking.start()
taken.wait()
libc.pthread_mutex_lock(mutex)
looking.join()
"""
    assert "True 0" in _signalled(tmp_path, after=after)


def test_the_handler_does_it_if_the_program_has_the_pipe_of_signals(tmp_path):
    before = "pipe = os.pipe(); os.set_blocking(pipe[1], False); signal.set_wakeup_fd(pipe[1])"
    after = "os.kill(os.getpid(), signal.SIGUSR2); print(os.path.exists(os.environ['TORCH_FR_DUMP_TEMP_FILE'] + '0'))"
    assert "True" in _signalled(tmp_path, before, after)


def test_signals_that_come_during_a_dump_do_not_nest(tmp_path):
    after = """
begun = []
def replace(path, content):
    begun.append(path)
    if len(begun) < 50:
        os.kill(os.getpid(), signal.SIGUSR2)
flight_recorder.files.replace = replace
os.kill(os.getpid(), signal.SIGUSR2)
print("dumps:", len(begun), flight_recorder._listener._dumping)
"""
    assert "dumps: 1 False" in _signalled(tmp_path, after=after)
    without = "flight_recorder._SignalListener._dumping = property(lambda self: False, lambda self, value: None)"
    assert "dumps: 50 False" in _signalled(tmp_path, without, after)


@pytest.mark.parametrize("name", ["NONE", "KILL", "0"])
def test_a_signal_that_cannot_be_caught_is_a_warning(name, tmp_path):
    assert "TRICOMM_DUMP_SIGNAL" in _signalled(tmp_path, name=name)


# On a GPU


PLAN = layout.plan(2, 1 << 16)
CHUNK = 2 * registry.find("all_reduce", "one_shot", "ll").chunk_words(2, PLAN)


def on_gpu(calls, started, ended, block_3=None, chunks=()):
    """(started, ended) of calls with these epochs before them and numbers of chunks, if the kernels' words say this."""
    flags = [0] * layout.ENDED + [ended] * layout.MAX_BLOCKS
    flags[layout.STARTED], flags[layout.ENDED + 3] = started, ended if block_3 is None else block_3
    whats = ("all_reduce", "sum", "float32", "one_shot", "ll")
    counts = [chunk * CHUNK for chunk in (*chunks, *[1] * len(calls))]
    records = [Descriptor(0, 0, *whats, count, -1, 1, "eager").packed() for count in counts]
    entries = [full((number, records[number - 1], 5, before)) for number, before in enumerate(calls, 1)]
    call_states.on_gpu(entries, flags, PLAN, 2)
    return "".join("c" if e[ENDED] else "r" if e[STARTED] else "s" for e in entries)


@pytest.mark.parametrize(
    ("calls", "started", "ended", "states"),
    [
        ([1, 1, 1, 1], 1, 1, "rsss"),  # all launched before the first one began
        ([1, 1, 1, 1], 3, 3, "ccrs"),
        ([1, 1, 1, 1], 4, 5, "cccc"),
        ([1, 1, 1, 1], 2, 3, "ccss"),  # the third one waits for another kernel of its stream
        ([1, 2, 9, 9], 10, 10, "cccr"),  # the second one was of seven chunks
        ([1, 2, 2], 4, 4, "ccr"),  # of several chunks: the last one has not ended while a kernel runs
        ([(1 << 32) - 1, (1 << 32) - 1, 3], 4, 4, "ccr"),  # epochs wrap
    ],
)
def test_states_on_a_gpu_follow_from_epochs(calls, started, ended, states):
    assert on_gpu(calls, started, ended) == states


def test_calls_after_one_of_several_chunks_do_not_look_further():
    words = ((1, 1), (1, 8), (8, 8), (8, 9))
    assert [on_gpu([1] * 4, *started_and_ended, chunks=[7]) for started_and_ended in words] == [
        "rsss",
        "csss",
        "crss",
        "ccss",
    ]
    assert on_gpu([1] * 4, 2, 2, chunks=[1, 7]) == "crss" and on_gpu([1] * 4, 2, 9, chunks=[1, 7]) == "ccss"
    last = (1 << 32) - 1
    assert on_gpu([last] * 3, 3, 3, chunks=[2, 3]) == "crs"  # after the last epoch comes 2


def test_a_call_runs_until_its_last_block_has_ended():
    assert on_gpu([1, 1, 1, 1], 3, 4, block_3=3) == "ccrs"
    assert on_gpu([1, 1, 1, 1], 3, 4, block_3=4) == "cccs"


def test_a_call_costs_no_more_than_its_entry():
    """The cost is measured by `devtools.c10d_overhead`; here it is that no call makes more than an entry."""
    with null_communicator() as comm:
        x = torch.ones(8)
        comm.all_reduce(x)
        recorder = comm._group.recorder
        for _ in range(5):
            comm.all_reduce(x)
        assert [type(entry) for entry in recorder.numbered[1:7]] == [tuple] * 6
        assert [len(entry) for entry in recorder.numbered[1:7]] == [4] * 6


# Of torch 2.11, whose analyser refuses a dump with another name.
KNOWN = set(
    """broadcast reduce all_gather all_reduce reduce_scatter gather scatter all_to_all all_reduce_barrier
    allreduce_coalesced all_gather_into_tensor_coalesced reduce_scatter_tensor_coalesced ALLGATHER_coalesced
    REDUCE_SCATTER_coalesced""".split()
)


def test_dumps_have_names_that_old_analysers_know(recorder):
    made = recorder()
    names = [*collective_specs.COLLECTIVES, *collective_specs.FUSED, "all_gather_v", "reduce_scatter_v", "barrier"]
    calls = [[Made(name, "none", torch.float32, 2, -1)] for name in [*names, "all_reduce_sparse"]]
    calls += [call * 2 for call in calls if call[0].collective in COALESCED]
    for number, several in enumerate(calls, 1):
        made.add(begun(number, several))
    (path,) = flight_recorder.dump()
    shown = [call["profiling_name"].removeprefix("nccl:") for call in loaded(path)["entries"]]
    assert len(shown) == len(calls) and set(shown) <= KNOWN
