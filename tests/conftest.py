"""What has to be set before any test imports torch."""

import os


def pytest_configure(config):
    """GPU tests run ranks as streams of one process; the driver reads these when it starts."""
    if "gpu" in config.option.markexpr and "not gpu" not in config.option.markexpr:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
