"""How an arena is divided: nothing overlaps, tiles divide buffers, and little is left unused."""

import itertools

import pytest

from tricomm.errors import InvalidArgument
from tricomm.kernels import layout
from tricomm.kernels.collectives import registry
from tricomm.options import Options

ARENAS = [size << 10 for size in (128, 256, 1000, 4096, 1 << 14, 1 << 16, 3 << 15, 1 << 20)]
PLANS = [
    pytest.param(world_size, nbytes, id=f"{world_size}-{nbytes}")
    for world_size, nbytes in itertools.product(range(1, layout.MAX_WORLD_SIZE + 1), ARENAS)
    if nbytes >= 1 << 20 or world_size <= 8
]


@pytest.mark.parametrize(("world_size", "nbytes"), PLANS)
def test_parts_lie_one_behind_the_other(world_size, nbytes):
    plan = layout.plan(world_size, nbytes)
    headers = layout.HEADERS + 8 * layout.PHASES * 2 * world_size * layout.MAX_BLOCKS
    assert headers <= plan.ll
    assert plan.ll + 2 * world_size * plan.ll_buffer <= plan.simple
    assert plan.simple + 2 * world_size * plan.simple_buffer <= plan.channel_states
    assert plan.channel_states + world_size * plan.channels * layout.CHANNEL_STATE <= plan.slots
    assert plan.slots + world_size * plan.channels * layout.SLOTS * plan.slot <= plan.nbytes <= nbytes
    assert all(place % 128 == 0 for place in (plan.ll, plan.simple, plan.channel_states, plan.slots))


@pytest.mark.parametrize(("world_size", "nbytes"), PLANS)
def test_the_largest_tile_is_a_power_of_two_and_divides_its_part_of_a_buffer(world_size, nbytes):
    plan = layout.plan(world_size, nbytes)
    for kernel in registry.KERNELS:
        tile = plan.largest_tile(kernel.algorithm, kernel.protocol)
        assert tile & (tile - 1) == 0
        assert plan.buffer_words(kernel.algorithm, kernel.protocol) % tile == 0


@pytest.mark.parametrize("world_size", range(1, layout.MAX_WORLD_SIZE + 1))
def test_buffers_fill_nine_tenths_of_the_default_arena_and_have_tiles_of_2048_words(world_size):
    nbytes = Options().arena_bytes
    plan = layout.plan(world_size, nbytes)
    assert 2 * world_size * (plan.ll_buffer + plan.simple_buffer) >= 0.9 * nbytes
    assert 8 * world_size * plan.ll_buffer <= nbytes  # a quarter: two buffers a rank
    assert plan.largest_tile("two_shot", "simple") >= 2048
    assert plan.slot_words("simple") >= 1024


def test_the_smallest_arena_is_named_and_works():
    for world_size in range(1, layout.MAX_WORLD_SIZE + 1):
        with pytest.raises(InvalidArgument, match="at least (\\d+) bytes") as refused:
            layout.plan(world_size, 4096)
        least = int(str(refused.value).split("at least ")[1].split()[0])
        assert layout.plan(world_size, least).nbytes <= least
