"""Launch shapes by rule, of kernels that are asked for by name."""

from tests.policy.test_selection import site
from tricomm.policy.selection import choose


def test_long_shards_of_eight_ranks_take_whole_tiles_through_a_switch_alone():
    def of(nbytes, algorithm, world_size=8):
        here = site(world_size=world_size, no_multicast="")
        choice = choose(here, "all_reduce", nbytes, algorithm=algorithm, protocol="simple")
        return choice.block, choice.warps

    half, whole, longest = (256, 4), (512, 8), 4 << 20  # two whole tiles a block
    assert [of(n, "multicast") for n in (longest, longest + 64, 64 << 20)] == [half, whole, whole]
    assert of(64 << 20, "two_shot") == half and of(longest, "multicast", 4) == whole
