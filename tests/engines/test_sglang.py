"""SGLang's own GroupCoordinator and norm layer over tricomm, with the real package: make engines."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests import ranks

pytestmark = pytest.mark.engines
if find_spec("sglang") is None:
    pytest.skip("SGLang is not installed", allow_module_level=True)

from tests.engines.bodies import sglang_bodies as bodies  # noqa: E402
from tricomm.engines import sglang_plugin  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def preloaded():
    """SGLang takes seconds to import: the fork server does it once."""
    ranks.CONTEXT.set_forkserver_preload(["tests.preloaded", "tests.ranks", "tests.engines.bodies.sglang_bodies"])


@pytest.mark.parametrize("world_size", [2, 4])
def test_all_reduce_and_fused_calls_are_exact_and_run_by_the_kernels(url, world_size):
    for wrong, calls in ranks.run(world_size, bodies.exact, url, timeout=400):
        assert wrong == []
        assert calls >= 4 * len(bodies.DTYPES) * len(bodies.SHAPES)


@pytest.mark.parametrize("how", ["size", "unset", "gloo", "version"])
def test_what_is_not_for_the_kernels_goes_sglangs_own_way(url, how, capfd):
    assert ranks.run(2, bodies.left_alone, url, how, timeout=200) == [3.0, 3.0]


def test_this_version_is_in_the_tested_range():
    import sglang

    assert sglang_plugin.TESTED.refusal("SGLang", sglang.__version__) is None
