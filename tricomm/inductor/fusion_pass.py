"""A pass of Inductor that replaces all-reduce, residual and RMSNorm by a fused operator of `torch.ops.tricomm`.

    all_reduce -> wait -> views -> add residual -> norm        becomes        all_reduce_rms_norm -> norm, residual

The decision depends on graph and group only, so ranks with equal graphs make the same. If the graphs differ, the ranks'
calls differ, and all ranks get `CollectiveMismatch`.

A fused call has the bits of `torch.ops.tricomm.rms_norm` after the group's all-reduce. Inductor, when it compiles the
graph without the pass, also chooses in which order a norm spelled in torch adds its squares, and which values of 16
bits it leaves unrounded inside a kernel. `exact` leaves each all-reduce where this could change a bit.
"""

from __future__ import annotations

import logging
import operator
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._functorch._aot_autograd import logging_utils
from torch._inductor import custom_graph_pass
from torch.distributed import distributed_c10d
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from tricomm.c10d.process_group import TricommGroup
from tricomm.errors import InvalidArgument
from tricomm.inductor import chains
from tricomm.inductor.chains import Chain, NotFused
from tricomm.inductor.norms import value

log = logging.getLogger("tricomm")

# Before 2.13 torch does not tell a pass whether the graph is for inference.
_Base: Any = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", custom_graph_pass.CustomGraphPass)


class Left(NamedTuple):
    """An all-reduce that was not fused: its node in the graph, the name of its group, and the reason."""

    node: str
    group: str
    reason: str


class FusionPass(_Base):  # type: ignore[misc]
    """A pass made by `tricomm.compile_pass`.

    exact   see `compile_pass`
    fused   how often each fused operator was put into a graph
    left    the all-reduces that were not fused

    A graph that Inductor takes from its cache is not counted.
    """

    def __init__(self, exact: bool) -> None:
        self.exact = exact
        self.fused: Counter[str] = Counter()
        self.left: list[Left] = []

    def __call__(self, graph: Graph, is_inference: bool | None = None) -> None:
        if is_inference is None:
            is_inference = any(name.endswith("inference") for name in logging_utils.graph_being_compiled)
        for node in [node for node in graph.nodes if chains.is_all_reduce(node)]:
            group = str(node.kwargs.get("group", node.args[-1]))
            try:
                if not is_inference:
                    raise NotFused("the graph is one of training, and fused calls have no gradient")
                name = _replace(graph, chains.find(node, self.exact))
            except NotFused as reason:
                self.left.append(Left(node.name, group, str(reason)))
                log.info("compile_pass: %s of group %r is left: %s", node.name, group, reason)
            else:
                self.fused[name] += 1
                log.info("compile_pass: %s of group %r became %s", node.name, group, name)

    def uuid(self) -> Any:
        """For the key of Inductor's cache: this code, and all inputs of the decision except the graph."""
        files = tuple(str(file) for file in sorted(Path(__file__).parent.glob("*.py")))
        groups = sorted((name, _invariant(group)) for group, name in distributed_c10d._world.pg_names.items())
        return custom_graph_pass.get_hash_for_files(files), self.exact, tuple(groups)


def compile_pass(*, exact: bool = True) -> FusionPass:
    """A pass of Inductor that fuses all-reduces over tricomm's groups with the addition of a residual and the RMSNorm
    after them: `torch._inductor.config.post_grad_custom_post_pass = tricomm.compile_pass()`.

    It applies to graphs for inference and changes no bit of their results: it fuses norms by
    `torch.ops.tricomm.rms_norm` or its quantising forms. With `exact=False` it also fuses norms written in torch; their
    results become those of `torch.ops.tricomm.rms_norm`. `fused` counts the fused calls, `left` has the reason for
    every other all-reduce.
    """
    if not isinstance(exact, bool):
        raise InvalidArgument(f"compile_pass: exact={exact!r}: True or False is needed")
    return FusionPass(exact)


def _invariant(group: Any) -> str:
    return f"tricomm {group.batch_invariant}" if isinstance(group, TricommGroup) else ""


def _replace(graph: Graph, chain: Chain) -> str:
    """Put the fused operator into the graph; returns its name."""
    norm, written = chain.norm, chain.written
    name = f"all_reduce_rms_norm{norm.suffix or ''}"
    with graph.inserting_before(chain.place):
        x = chain.x
        for view in chain.views:
            x = _called(graph, view.target, (x, *view.args[1:]))
        operands = (x, chain.residual, *norm.tail, chain.group)
        fused = _called(graph, getattr(torch.ops.tricomm, name).default, operands)
        residual = None if written is None else _called(graph, operator.getitem, (fused, len(value(fused)) - 1))
        result = fused if norm.suffix is not None else _called(graph, operator.getitem, (fused, 0))
    dead = [norm.out, *reversed(chain.nodes), *chain.total.all_input_nodes]
    norm.out.replace_all_uses_with(result)
    if written is not None and residual is not None:
        written.replace_all_uses_with(residual)
    _erase(graph, dead)
    return name


def _called(graph: Graph, target: Any, args: tuple[Any, ...]) -> Node:
    """A new node, with its fake value, which later passes read."""
    node = graph.call_function(target, args)
    values = map_arg(args, value)
    with nullcontext() if target is operator.getitem else value(args[0]).fake_mode:
        node.meta["val"] = target(*values)
    return node


def _erase(graph: Graph, nodes: list[Node]) -> None:
    """Erase unused nodes among `nodes`, and nodes that only they used. A later pass would keep collectives."""
    for node in nodes:
        if node.op == "call_function" and not node.users and not node._erased:
            nodes += node.all_input_nodes
            graph.erase_node(node)
