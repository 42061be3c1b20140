"""A thread that cannot start is a named error, or only its own work is missing."""

import threading

import pytest
from torch.distributed import HashStore

import tricomm
from tests.core.faults.test_monitor import Control
from tricomm.core.watch.monitor import Monitor
from tricomm.core.watch.watcher import Watcher
from tricomm.errors import ResourceError
from tricomm.metrics import publish
from tricomm.store.control import Fault


@pytest.fixture
def starts(monkeypatch):
    """Threads start as usual; those whose name is added to the list do not."""
    refused, start = [], threading.Thread.start

    def attempt(thread):
        if thread.name in refused:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", attempt)
    return refused


def test_a_group_that_cannot_be_watched_is_not_watched_later_either(starts):
    watcher, groups = Watcher(lambda: 0), [Monitor(Control(), 60.0, 30.0, Watcher(lambda: 0)) for _ in range(2)]
    starts.append("tricomm-watcher")
    with pytest.raises(ResourceError, match=r"the thread tricomm-watcher cannot start .*\(ulimit -u"):
        watcher.add(groups[0])
    starts.clear()
    watcher.add(groups[1])
    watcher.discard(groups[1])
    assert not any(thread.name == "tricomm-watcher" for thread in threading.enumerate())


def test_a_backend_is_aborted_as_soon_as_a_thread_can_start(starts):
    class Backend:
        aborted = threading.Event()

        def error(self):
            return None

        def abort(self):
            assert not self.aborted.is_set()
            self.aborted.set()

    monitor, backend = Monitor(Control(), 60.0, 30.0), Backend()
    monitor.watch(backend)
    starts.append("tricomm-abort")
    monitor.abort(Fault("GroupAborted", 0, 1, "lost"))
    monitor.look(0.02)
    assert not backend.aborted.is_set()
    starts.clear()
    monitor.look(0.02)
    assert backend.aborted.wait(10)
    monitor.look(0.02)


def test_a_job_without_its_statistics_thread_writes_them_at_exit(starts, monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("TRICOMM_STATS", "60")
    monkeypatch.setenv("TRICOMM_STATS_DIR", str(tmp_path))
    monkeypatch.setattr(publish, "_publisher", None)
    ends = []
    monkeypatch.setattr(publish.atexit, "register", ends.append)
    starts.append("tricomm-publisher")
    with tricomm.Communicator(HashStore(), 0, 1, "cpu", options=tricomm.Options(arena_bytes=256 * 1024)) as comm:
        comm.barrier()
    assert "statistics are written only when the process ends" in caplog.text
    [end] = [call for call in ends if call.__module__ == publish.__name__]  # a first group registers others
    end()
    assert len(list(tmp_path.iterdir())) == 1
