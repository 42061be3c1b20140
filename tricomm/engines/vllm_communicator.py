"""vLLM's device communicator, extended: tricomm runs the collectives that it supports, vLLM the rest.

Can be imported without vLLM: `communicator_class` gets the class that it extends.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch

from tricomm.c10d.custom_ops import define
from tricomm.engines.engine_group import Engine, EngineGroup, open_group, without

# Groups whose collectives are all_reduce, all_gather and reduce_scatter of equal shapes: tensor parallelism, and decode
# context parallelism inside it. Each has its own memory; other groups would pay for memory that they do not use.
GROUPS = frozenset({"tp", "dcp"})

# The parts of vLLM's class that the adapter uses: parameters by method, and attributes that `__init__` sets.
METHODS = {
    "__init__": ("cpu_group", "device", "device_group", "unique_name"),
    "all_reduce": ("input_",),
    "all_gather": ("input_", "dim"),
    "reduce_scatter": ("input_", "dim"),
    "suspend": (),
    "resume": (),
    "destroy": (),
}
ATTRIBUTES = ("cpu_group", "device", "unique_name", "world_size")

_members: WeakValueDictionary[str, VllmCollectives] = WeakValueDictionary()


class VllmCollectives:
    """Methods that override vLLM's; `communicator_class` makes the subclass.

    `engine` names vLLM to the group; `refusal` says why no group may use tricomm, or None.
    """

    engine: Engine
    refusal: Callable[[], str | None]
    unique_name: str
    world_size: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tricomm = self._open()
        _members[self.unique_name] = self

    def _open(self) -> EngineGroup:
        own: Any = self
        kind = self.unique_name.split(":")[0]
        why = type(self).refusal()
        if kind not in GROUPS:
            why = f"only the groups {', '.join(sorted(GROUPS))} use tricomm"
        if why is not None:
            return without(self.unique_name, self.engine, why, logging.WARNING if kind in GROUPS else logging.DEBUG)
        return open_group(own.cpu_group, own.device, self.unique_name, self.engine)

    # Under torch.compile an operator stays in the graph, and decides when it runs, because shapes may be symbolic
    # before

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        """The sum of `input_` over all ranks, as vLLM's method; always out of place if the kernels run it."""
        if torch.compiler.is_compiling():
            return torch.ops.tricomm.vllm_all_reduce(input_, self.unique_name)  # type: ignore[no-any-return]
        return self._run("all_reduce", input_)

    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Every rank's `input_`, concatenated along `dim`, as vLLM's method."""
        if torch.compiler.is_compiling():
            return torch.ops.tricomm.vllm_all_gather(input_, dim, self.unique_name)  # type: ignore[no-any-return]
        return self._run("all_gather", input_, dim)

    def reduce_scatter(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """This rank's part along `dim` of the sum of `input_` over all ranks, as vLLM's method."""
        if torch.compiler.is_compiling():
            return torch.ops.tricomm.vllm_reduce_scatter(input_, dim, self.unique_name)  # type: ignore[no-any-return]
        return self._run("reduce_scatter", input_, dim)

    def _run(self, collective: str, input_: torch.Tensor, *dim: int) -> torch.Tensor:
        runs = self.tricomm if self.tricomm.takes(collective, input_, *dim) else super()
        return getattr(runs, collective)(input_, *dim)  # type: ignore[no-any-return]

    # Sleep mode, and the end

    def suspend(self) -> None:
        """Release vLLM's and tricomm's memory; every rank calls it. Addresses in graphs stay valid."""
        super().suspend()  # type: ignore[misc]
        self.tricomm.suspend()

    def resume(self) -> None:
        """Allocate vLLM's and tricomm's memory again; every rank calls it."""
        super().resume()  # type: ignore[misc]
        self.tricomm.resume()

    def destroy(self) -> None:
        """Leave the group."""
        self.tricomm.close()
        super().destroy()  # type: ignore[misc]


def communicator_class(base: type, engine: Engine, refusal: Callable[[], str | None]) -> str:
    """The qualified name, for vLLM to resolve, of a subclass of `base` with tricomm's collectives before its own."""
    name = f"Tricomm{base.__name__}"
    made = type(
        name, (VllmCollectives, base), {"engine": engine, "refusal": staticmethod(refusal), "__module__": __name__}
    )
    setattr(sys.modules[__name__], name, made)
    return f"{__name__}.{name}"


def misfits(base: type) -> list[str]:
    """The names that the adapter needs and `base` does not have; empty if it fits."""
    wrong = []
    for method, names in METHODS.items():
        member = getattr(base, method, None)
        if member is None:
            wrong.append(f"{base.__name__}.{method} is gone")
            continue
        parameters = inspect.signature(member).parameters.values()
        positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "self"]
        wrong += [f"{base.__name__}.{method} has no parameter {name!r}" for name in names if name not in positional]
        if method != "__init__":
            needed = [p.name for p in parameters if p.default is p.empty and p.name not in ("self", *names)]
            wrong += [f"{base.__name__}.{method} needs the parameter {name!r}" for name in needed]
    source = "".join(
        inspect.getsource(vars(kind)["__init__"]) for kind in base.__mro__[:-1] if "__init__" in vars(kind)
    )
    wrong += [f"{base.__name__} sets no {name}" for name in ATTRIBUTES if f"self.{name} = " not in source]
    return wrong


def _reduced(x: torch.Tensor, group: str) -> torch.Tensor:
    """A copy if vLLM's all_reduce was in place, because an operator must not return its input."""
    member = _members[group]
    return member._run("all_reduce", x if member.tricomm.takes("all_reduce", x) else x.clone())


def _shaped(x: torch.Tensor, dim: int, times: int, parts: int) -> torch.Tensor:
    shape = list(x.shape)
    shape[dim] = shape[dim] * times // parts
    return x.new_empty(shape)


define(
    "vllm_all_reduce(Tensor x, str group) -> Tensor",
    _reduced,
    lambda x, group: torch.empty_like(x, memory_format=torch.contiguous_format),
)
define(
    "vllm_all_gather(Tensor x, int dim, str group) -> Tensor",
    lambda x, dim, group: _members[group]._run("all_gather", x, dim),
    lambda x, dim, group: _shaped(x, dim, _members[group].world_size, 1),
)
define(
    "vllm_reduce_scatter(Tensor x, int dim, str group) -> Tensor",
    lambda x, dim, group: _members[group]._run("reduce_scatter", x, dim),
    lambda x, dim, group: _shaped(x, dim, 1, _members[group].world_size),
)
