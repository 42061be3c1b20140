"""torch's c10d classes, typed as `Any`, because their stubs are incomplete and differ between versions; and
torch's tables of groups."""

from __future__ import annotations

from typing import Any

import torch
from torch._C import _distributed_c10d

from tricomm.errors import InvalidArgument

c10d: Any = _distributed_c10d


class NoBackend(InvalidArgument, RuntimeError):
    """The group does not serve a device. torch takes a `RuntimeError` as the answer that a backend is missing."""


class AnsweringGroup(c10d.ProcessGroup):  # type: ignore[misc]
    """A group that has the attributes that torch's `ProcessGroup` reads from backend objects, which the CPU lacks."""

    __slots__ = ("__dict__",)

    # Attributes of the backend object for the CPU, which is the group itself.
    supports_coalescing = supports_splitting = supports_time_estimate = False
    supports_shrinking = True  # by `dist.shrink_group` (`tricomm.torch_backend`)
    use_pg_for_symm_mem_rendezvous = False

    def __init__(self, config: Any) -> None:
        super().__init__(config.rank, config.world_size)
        self._config = config
        self._name, self._desc = str(config.name), ""
        self.options = c10d.Backend.Options("tricomm", config.timeout)
        self.options.global_ranks_in_group, self.options.group_name = config.ranks, config.name

    def get_group_store(self) -> Any:
        return self._config.store

    def _set_sequence_number_for_group(self) -> None:
        """Nothing to do: the number begins at 0 on every rank."""

    def eager_connect_single_device(self, device: torch.device | None = None) -> None:
        """Nothing to do: the connections are made with the group."""

    def split_group(self, *given: Any, **options: Any) -> Any:
        """Refused: torch's method reads a backend in C++ that is not there, which ends the process."""
        raise InvalidArgument(f"{self._config}: split_group: call dist.new_group(ranks) on every rank instead")

    def getBackendName(self) -> str:
        return "tricomm"

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._desc

    def setGroupDesc(self, text: str) -> None:
        self._desc = text

    def _has_hooks(self) -> bool:
        return False

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False


def register(world: Any, group: Any, name: str, made_by: tuple[str, Any], backend_config: str, *tags: str) -> None:
    """Register `group` with torch, by `tags` and its ranks. `made_by`: its backend's name, and the store for its
    subgroups."""
    world.pg_map[group] = made_by
    world.pg_names[group] = name
    world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(group._config.ranks)}
    world.pg_backend_config[group] = backend_config
    world.pg_to_tag[group] = tags[0]
    for tag in tags:
        world.tags_to_pg.setdefault(tag, []).append(group)
    c10d._register_process_group(name, group)


def unregister(world: Any, group: Any) -> None:
    """Unregister `group` from torch, as `dist.destroy_process_group` does."""
    name, tag = world.pg_names.pop(group), world.pg_to_tag.pop(group, None)
    for known in (world.pg_map, world.pg_group_ranks, world.pg_backend_config, world.pg_coalesce_state):
        known.pop(group, None)
    for tagged in (tag, ""):  # torch registers its own groups under both
        if group in world.tags_to_pg.get(tagged, ()):
            world.tags_to_pg[tagged].remove(group)
    c10d._unregister_process_group(name)
