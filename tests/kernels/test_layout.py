"""How an arena is divided: nothing overlaps, tiles divide buffers, and little is left unused."""

import pytest

from tricomm.errors import InvalidArgument
from tricomm.kernels import layout
from tricomm.kernels.collectives import registry
from tricomm.options import Options
from tricomm.store import page

ARENAS = [size << 10 for size in (128, 256, 1000, 4096, 1 << 14, 1 << 16, 3 << 15, 1 << 20)]
PLANS = [
    layout.plan(world_size, nbytes)
    for world_size in range(1, layout.MAX_WORLD_SIZE + 1)
    for nbytes in ARENAS
    if nbytes >= 1 << 20 or world_size <= 8
]


def test_parts_of_an_arena_are_adjacent():
    for plan in PLANS:
        ranks = plan.world_size
        assert layout.HEADERS + 8 * layout.PHASES * 2 * ranks * layout.MAX_BLOCKS <= plan.ll
        assert plan.ll + 2 * ranks * plan.ll_buffer <= plan.wide
        assert plan.wide + 2 * ranks * plan.wide_buffer <= plan.simple
        assert plan.simple + 2 * ranks * plan.simple_buffer <= plan.queue_states
        assert plan.queue_states + ranks * plan.queues * layout.QUEUE_STATE <= plan.slots
        assert plan.slots + ranks * plan.queues * layout.SLOTS * plan.slot <= plan.nbytes
        assert all(place % 128 == 0 for place in (plan.ll, plan.wide, plan.simple, plan.queue_states, plan.slots))


def test_words_of_the_group_table_and_of_the_control_page_are_apart():
    assert layout.QUEUES < layout.PEERS and layout.PEERS + layout.MAX_WORLD_SIZE <= layout.QUAD
    assert layout.MULTICAST < layout.EPOCHS and layout.EPOCHS + layout.MAX_BLOCKS <= layout.HEADERS // 8
    assert layout.LOADING < layout.RECV_SOURCE and layout.CONTROL_WORDS <= page.WORDS
    assert layout.RECV_SOURCE + layout.RECV_SOURCE_WORDS <= layout.ENDED


def test_no_plan_is_larger_than_its_arena():
    for nbytes in ARENAS:
        assert layout.plan(8, nbytes).nbytes <= nbytes


def test_the_largest_tile_is_a_power_of_two_and_divides_its_part_of_a_buffer():
    for plan in PLANS:
        for kernel in registry.KERNELS:
            tile = plan.largest_tile(kernel.algorithm, kernel.protocol)
            assert tile & (tile - 1) == 0
            words = layout.tile_words(kernel.protocol, tile)
            assert plan.buffer_words(kernel.algorithm, kernel.protocol, kernel.collective) % words == 0
            assert words % 2 == 0  # shards are whole pairs of words


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8, 10, 16])
def test_buffers_fill_nine_tenths_of_the_default_arena_and_have_tiles_of_2048_words(world_size):
    nbytes = Options().arena_bytes
    plan = layout.plan(world_size, nbytes)
    assert 2 * world_size * (plan.ll_buffer + plan.wide_buffer + plan.simple_buffer) >= 0.9 * nbytes
    assert 8 * world_size * plan.wide_buffer <= nbytes  # a quarter: two buffers a rank
    assert plan.ll_buffer == plan.wide_buffer // 2
    assert 3 / 4 * plan.wide_buffer >= 192 << 10  # of payload, in one chunk
    assert plan.largest_tile("two_shot", "simple") >= 2048
    assert plan.slot_words("simple") >= 1024


def test_the_smallest_arena_is_named_and_works():
    for world_size in range(1, layout.MAX_WORLD_SIZE + 1):
        with pytest.raises(InvalidArgument, match="at least (\\d+) bytes") as refused:
            layout.plan(world_size, 4096)
        least = int(str(refused.value).split("at least ")[1].split()[0])
        assert layout.plan(world_size, least).nbytes <= least
