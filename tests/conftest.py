"""What has to be set before any test imports torch, and what processes that tests start inherit."""

import os
import signal


def pytest_configure(config):
    """GPU tests run ranks as streams of one process; the driver reads these when it starts."""
    if "gpu" in config.option.markexpr and "not gpu" not in config.option.markexpr:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    # A shell's background jobs ignore Ctrl-C, and so would all processes that they start. A handler ends with exec.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda number, frame: None)
