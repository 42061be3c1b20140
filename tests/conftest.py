"""Sets the environment that torch reads at import and that the tests' processes inherit."""

import gc
import os
import shutil
import signal
import tempfile
import zlib

import pytest


def pytest_configure(config):
    """GPU tests run ranks as streams of one process; the driver reads these when it starts."""
    if "gpu" in config.option.markexpr and "not gpu" not in config.option.markexpr:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    # Of several threads in each of many processes most would spin.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Not the default, /dev/shm: tests check that no file is left there, and other test runs may create some.
    if "TRICOMM_SOCKET_DIR" not in os.environ:
        os.environ["TRICOMM_SOCKET_DIR"] = config.sockets = tempfile.mkdtemp(prefix="tc")
        os.chmod(config.sockets, 0o1777)  # some tests are another user
    # Every fault dumps the last calls.
    if "TORCH_FR_DUMP_TEMP_FILE" not in os.environ:
        config.dumps = tempfile.mkdtemp(prefix="tc-dumps")
        os.chmod(config.dumps, 0o1777)
        os.environ["TORCH_FR_DUMP_TEMP_FILE"] = f"{config.dumps}/rank_"
    # A shell's background jobs ignore Ctrl-C, and so would all processes that they start. A handler ends with exec.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda number, frame: None)


def pytest_unconfigure(config):
    gc.unfreeze()  # or libraries report what is frozen as leaked
    for folder in filter(None, (getattr(config, name, None) for name in ("sockets", "dumps"))):
        shutil.rmtree(folder, ignore_errors=True)


# A file runs in one worker. Those that take longest begin first, so that none of them ends alone.
LONGEST = (
    "soak/test_soak.py", "explorer/test_mutants.py", "c10d/test_connections.py", "devtools/test_gpu_evidence.py",
    "compiled/test_check_compiled.py", "c10d/test_collectives.py", "core/test_collectives.py",
    "core/test_communicator.py", "tuner/test_tune_command.py", "bench/test_bench.py", "faults/test_interrupts.py",
    "test_plain_checkout.py", "machine_code/test_kernel_report.py", "test_examples.py",
    "faults/test_faults.py", "store/test_handshake_failures.py", "compiled/test_ptx_mutants.py",
    "c10d/test_training.py", "core/test_point_to_point.py", "kernels/test_protocol.py", "explorer/test_shipped.py",
    "c10d/test_two_hosts.py", "compiled/test_bits.py", "c10d/test_endings.py",
)  # fmt: skip


# Of the explorer's tests those that every run has. The others are marked `explorer`, unless a path names them.
SMOKE = ("explorer/test_check.py", "execution/test_shipped_all_reduce.py", "compiled/test_stream_races.py")


def pytest_addoption(parser):
    parser.addoption("--share", default="1/1", metavar="K/N", help="run the K-th of N shares of the tests")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    named = any("explorer" in str(given) for given in config.args)
    for item in items:
        of_it = item.path.is_relative_to(config.rootpath / "tests" / "explorer")
        if of_it and not named and not str(item.path).endswith(SMOKE):
            item.add_marker(pytest.mark.explorer)
    places = {name: place for place, name in enumerate(LONGEST)}

    def place(item):
        return next((n for name, n in places.items() if str(item.path).endswith(name)), len(places))

    items.sort(key=place)
    which, shares = map(int, config.getoption("--share").split("/"))
    kept = [item for item in items if zlib.crc32(item.nodeid.encode()) % shares == which % shares]
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
        items[:] = kept


@pytest.fixture(scope="module", autouse=True)
def settled():
    """Freeze the objects that exist before a file's tests: a collection that visits them takes a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def url(tmp_path):
    """Where the ranks of a test meet: a file that only this user can reach."""
    tmp_path.chmod(0o700)
    return f"file://{tmp_path}/store"


@pytest.fixture
def unshrunk(monkeypatch):
    """Findings of `tricomm.check` stay as found: the further schedules of a finding take most of the time."""
    monkeypatch.setattr("tricomm.explorer.campaign._TRIES", 0)
    monkeypatch.setattr("tricomm.explorer.schedule.shrinking.shrink", lambda again, finding, execution, most: execution)


@pytest.fixture
def forked_workers(monkeypatch):
    """Workers of tricomm.perf.workers are forked: each would import torch."""
    from tests import forked

    monkeypatch.setattr("tricomm.perf.workers.subprocess", forked.for_workers())
