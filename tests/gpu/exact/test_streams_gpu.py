"""Exact results of ranks that are streams of one process: every kernel, type and operation. Run with `-m gpu`.

Not yet run on hardware.
"""

from functools import partial

import pytest
import torch

from tests.gpu import streams
from tests.gpu.exact import checks, variants

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
EACH = [pytest.param(k, n, id=f"{k.name}-{n}ranks") for n in (2, 4, 8) for k in checks.kernels(n)]


def check(kernel, world_size, part):
    if part not in checks.parts(kernel):
        pytest.skip(f"{kernel.collective} has no such calls")
    variants.compile_all(variants.sweep(kernel, world_size, (part,), variants.capability()))
    swept = partial(checks.sweep, kernel=kernel, wanted=(part,))
    assert streams.together(world_size, swept, checks.OPTIONS) == [[]] * world_size


@pytest.mark.parametrize(("kernel", "world_size"), EACH)
@pytest.mark.parametrize("part", checks.PARTS, ids=lambda part: part.replace(" ", "_"))
def test_results_are_exact(part, kernel, world_size):
    check(kernel, world_size, part)
