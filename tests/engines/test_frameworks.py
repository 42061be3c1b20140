"""Training frameworks over the backend, with the real packages: make engines."""

from __future__ import annotations

import socket
from importlib.util import find_spec

import pytest

from tests import ranks
from tests.engines.bodies import framework_bodies as bodies

pytestmark = pytest.mark.engines


@pytest.mark.parametrize("name", ["accelerate", "lightning", "torchtitan", "deepspeed"])
def test_trains_over_tricomm_by_one_line(name):
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert ranks.run(2, getattr(bodies, name), port, timeout=500) == [("tricomm", True, True)] * 2


def test_accelerate_takes_no_name_but_gloo_on_a_cpu():
    """So the group is made first there; on GPUs the name is enough."""
    if find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed")
    with pytest.raises(AssertionError, match="tricomm is not available, please use gloo"):
        ranks.run(1, bodies.accelerate_by_name, 0)
