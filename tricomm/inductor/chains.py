"""The all-reduces of a graph, the nodes after them, and whether a fused call has the same results."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch._inductor import config
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from tricomm.c10d.process_group import TricommGroup
from tricomm.c10d.torch_names import c10d
from tricomm.core.fused import fused_call
from tricomm.inductor import norms
from tricomm.inductor.norms import Norm, value

_aten, _functional = torch.ops.aten, torch.ops._c10d_functional
_ALL_REDUCE = (_functional.all_reduce.default, torch.ops.tricomm.all_reduce.default)
# Without aten.view.dtype, which changes the type, and with it the sum and the norm.
_VIEWS = (
    *(_aten.reshape.default, _aten.view.default, _aten._unsafe_view.default, _aten.unsqueeze.default),
    *(_aten.squeeze.default, _aten.squeeze.dim, _aten.squeeze.dims),
)
_READ_EXACTLY = (*_VIEWS, _aten.embedding.default, operator.getitem)
_IN_MEMORY = ("tricomm", "_c10d_functional")  # Inductor writes the operands and the results of these operators


class NotFused(Exception):
    """The reason why an all-reduce is not fused."""


class Chain(NamedTuple):
    """An all-reduce that a fused call can replace.

    x         input of the all-reduce
    total     node of the sum, after the wait
    views     views of the sum, each a view of the previous one
    add       the addition of the residual, if it is a node; else None
    residual  node, or None
    norm      the norm of the last of the nodes above
    group     name of the group
    """

    x: Node
    total: Node
    views: tuple[Node, ...]
    add: Node | None
    residual: Node | None
    norm: Norm
    group: str

    @property
    def nodes(self) -> list[Node]:
        """The nodes from the sum to the one that is normalised."""
        return [self.total, *self.views, *([] if self.add is None else [self.add])]

    @property
    def written(self) -> Node | None:
        """The node whose value the fused call returns next to the norm; None if no node has it."""
        return self.nodes[-1] if self.norm.residual is None else None

    @property
    def place(self) -> Node:
        """The first node that uses a result of the chain, where the fused call is inserted."""
        return self.norm.out if self.written is None else min(self.written.users)


def is_all_reduce(node: Node) -> bool:
    """Whether a node is an all-reduce of any kind."""
    if node.op != "call_function":
        return False
    target = node.args[0] if node.args and "auto_functionalized" in str(node.target) else node.target
    name = str(target)
    return name.startswith(("_c10d_functional.all_reduce", "tricomm.all_reduce")) and "rms_norm" not in name


def find(node: Node, exact: bool) -> Chain:
    """The chain that begins with the all-reduce `node`. Raises `NotFused` if there is none, or if a fused call could
    return other values, or, if `exact`, other bits."""
    x, group = _checked(node, exact)
    total = node if node.target == _ALL_REDUCE[1] else _waited(node)
    chain = _followed(x, total, group)
    _check_users(chain)
    _check_order(node, chain)
    if exact:
        _check_bits(chain)
    return chain


def _checked(node: Node, exact: bool) -> tuple[Node, str]:
    """Input and group of an all-reduce."""
    if node.target not in _ALL_REDUCE or node.kwargs:
        raise NotFused("only an out-of-place all_reduce of one tensor is fused")
    arguments: Any = node.args
    x, op, name = arguments
    if op != "sum":
        raise NotFused(f"op {op!r}: fused calls have only sum")
    try:
        group = c10d._resolve_process_group(name)
    except (RuntimeError, TypeError) as error:
        raise NotFused(f"this process has no group of that name: {error}") from error
    if not isinstance(group, TricommGroup):
        raise NotFused("the group is of another backend; tricomm.wrap(group) returns one that is fused")
    x_value = value(x)
    if x_value.dtype not in fused_call.DTYPES:
        raise NotFused(f"fused calls do not take {x_value.dtype}")
    if exact and x_value.device.type != "cpu" and not group.batch_invariant:
        raise NotFused(
            "on GPUs the order of an all-reduce's sum depends on the kernel; make the group batch-invariant "
            "(TRICOMM_BATCH_INVARIANT=1), or pass exact=False"
        )
    return x, name


def _waited(node: Node) -> Node:
    users = list(node.users)
    if len(users) != 1 or users[0].target != _functional.wait_tensor.default:
        raise NotFused(f"it is not waited for once: {_names(users)}")
    return users[0]


def _followed(x: Node, total: Node, group: str) -> Chain:
    """The chain of the first norm after `total`."""
    last = []
    for views in _views(total):
        rows = views[-1] if views else total
        last += [user for user in rows.users if user not in views]
        norm = norms.of(rows)
        if norm is not None:
            return Chain(x, total, views, None, norm.residual, norm, group)
        for add in rows.users:
            residual = _residual(add, rows)
            norm = None if residual is None else norms.of(add)
            if norm is not None and norm.residual is None:
                return Chain(x, total, views, add, residual, norm, group)
    raise NotFused(f"no norm that is known follows it, or the residual's addition after it: {_names(last)}")


def _views(total: Node) -> Iterator[tuple[Node, ...]]:
    """The views of `total` that keep its rows, each as the path to it; first `total` itself."""
    paths: list[tuple[Node, ...]] = [()]
    for path in paths:
        yield path
        node = path[-1] if path else total
        for user in node.users:
            if user.target in _VIEWS and _same(value(user).shape[-1:], value(total).shape[-1:]):
                paths.append((*path, user))


def _residual(add: Node, rows: Node) -> Node | None:
    """The residual that `add` adds to `rows`; None if `add` is no such addition."""
    if add.target != _aten.add.Tensor or add.kwargs:
        return None
    other = add.args[1] if add.args[0] is rows else add.args[0]
    found, wanted = value(other), value(rows)
    if other is rows or not isinstance(found, torch.Tensor) or found.dtype != wanted.dtype:
        return None
    return other if isinstance(other, Node) and _same(found.shape, wanted.shape) else None


def _same(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(statically_known_true(m == n) for m, n in zip(a, b, strict=True))


def _check_users(chain: Chain) -> None:
    """Check that no node but the addition uses the sum, because a fused call with a residual does not return it."""
    for node in chain.nodes:
        if node is not chain.written and len(node.users) > 1:
            raise NotFused(f"{node.name}, which a fused call does not return, has several users: {_names(node.users)}")


def _check_order(node: Node, chain: Chain) -> None:
    """Check that the operands of the fused call are computed before the first node that uses a result, where it is
    inserted."""
    place = chain.place
    for operand in (chain.residual, *chain.norm.tail):
        if isinstance(operand, Node) and (operand in chain.nodes or not operand < place):
            raise NotFused(f"{operand.name} is computed from the sum, or after {place.name} has used it")
    between = node.next
    while between is not place:
        if isinstance(between.target, torch._ops.OpOverload) and between.target._schema.is_mutable:
            raise NotFused(f"{between.name} changes a tensor between the all-reduce and its use by {place.name}")
        between = between.next


def _check_bits(chain: Chain) -> None:
    """Check that Inductor would compute the same bits from the unchanged graph."""
    if chain.norm.suffix is None:
        raise NotFused(
            "its norm is spelled in torch, so Inductor chooses the order of its sum and what is rounded before; use "
            "torch.ops.tricomm.rms_norm, or pass exact=False"
        )
    if config.emulate_precision_casts:
        return
    remedy = "set torch._inductor.config.emulate_precision_casts, or pass exact=False"
    _check_others(chain, remedy)
    if chain.add is None:
        return
    if chain.residual is not None and not _in_memory(chain.residual):
        raise NotFused(f"Inductor may add the residual {chain.residual.name} before it is rounded; {remedy}")
    if value(chain.add).dtype == torch.float32:
        return
    after = _after(chain.norm.out)
    for user in chain.add.users:
        if not (user in after or user.op == "output" or user.target == _aten.copy_.default or _is_call(user)):
            raise NotFused(f"Inductor may compute {user.name} from {chain.add.name} before it is rounded; {remedy}")


def _check_others(chain: Chain, remedy: str) -> None:
    """Inductor computes nodes from each other's values in registers, or from rounded values in memory. For nodes that
    can run before or after the call, fusing may change this, because other kernels are then next to the call."""
    before, after = _before(chain), {node for made in chain.nodes for node in _after(made)}
    for node in chain.total.graph.nodes:
        if node in before or node in after or not _is_generated(node):
            continue
        for other in (*node.all_input_nodes, *node.users):
            if _is_generated(other):
                raise NotFused(
                    f"Inductor may round {node.name} and {other.name}, which can run before or after it, differently; "
                    f"{remedy}"
                )


def _before(chain: Chain) -> set[Node]:
    """The all-reduce, and all nodes that the fused call depends on."""
    found = set[Node]()
    left = [chain.total, *(node for node in (chain.residual, *chain.norm.tail) if isinstance(node, Node))]
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += node.all_input_nodes
    return found


def _is_generated(node: Node) -> bool:
    """Whether `node` has a floating-point type and Inductor may generate the code that computes it."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target in _READ_EXACTLY or _is_call(node):
        return False
    made = value(node)
    return node.target != _aten.copy_.default and isinstance(made, torch.Tensor) and made.is_floating_point()


def _in_memory(node: Any) -> bool:
    """Whether every kernel that uses `node` reads it from memory, and so rounded to its type."""
    while isinstance(node, Node) and node.target in _READ_EXACTLY:
        node = node.args[0]
    return isinstance(node, Node) and (node.op in ("placeholder", "get_attr") or _is_call(node))


def _is_call(node: Node) -> bool:
    """Whether Inductor calls an operator for `node`, rather than generating its code."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in _IN_MEMORY


def _after(node: Node) -> set[Node]:
    """`node` and all nodes that depend on it, whose kernels cannot run before it."""
    found, left = {node}, [node]
    while left:
        new = [user for user in left.pop().users if user not in found]
        found.update(new)
        left += new
    return found


def _names(nodes: Any) -> str:
    return ", ".join(f"{node.name} ({node.target})" for node in nodes) or "nothing"
