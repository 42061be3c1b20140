"""Limits that keep the tree readable: lines a file, modules a folder, parameters a function, names, import circles.

Each rule is a function from the sources to complaints, so that a test can show that it does complain.
"""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOMS = ("tricomm", "explorer", "kernels", "store", "perf")
LINES = 400
MODULES = 20
PARAMETERS = 8
KERNEL_PARAMETERS = 12
# The kernels' folder grows with the algorithms that there are.
ANY_NUMBER_OF_MODULES = {"kernels/collectives"}
PUBLIC = {
    "tricomm/communicator.py:__init__",
    "explorer/campaign.py:check",
    "tricomm/core/calls/fused_calls.py:all_reduce_rms_norm",
    "tricomm/core/calls/fused_calls.py:all_reduce_rms_norm_quantized",
    "tricomm/core/calls/tuning_methods.py:explain",
    "tricomm/flashinfer/workspace.py:create_allreduce_fusion_workspace",
    "tricomm/flashinfer/fusion.py:allreduce_fusion",
}

Sources = dict[str, ast.Module]


@cache
def sources(root: Path, folders: tuple[str, ...] = ROOMS) -> Sources:
    """Path from the root -> syntax tree of every module. Links are not followed: a room is read once."""
    return {name: ast.parse((root / name).read_text()) for name in modules(root, folders)}


def modules(root: Path, folders: tuple[str, ...]) -> list[str]:
    """The paths of all modules from the root."""
    return [str(file.relative_to(root)) for folder in folders for file in sorted((root / folder).rglob("*.py"))]


def long_files(root: Path, folders: tuple[str, ...]) -> list[str]:
    """Files of more than `LINES` lines."""
    counted = ((name, len((root / name).read_text().splitlines())) for name in modules(root, folders))
    return [f"{name}: {lines} lines" for name, lines in counted if lines > LINES]


def crowded_folders(names: Iterable[str]) -> list[str]:
    """Folders of more than `MODULES` modules, `__init__` and `__main__` not counted."""
    counted = Counter(str(Path(name).parent) for name in names if Path(name).stem not in ("__init__", "__main__"))
    return [
        f"{folder}: {number} modules"
        for folder, number in counted.items()
        if number > MODULES and folder not in ANY_NUMBER_OF_MODULES
    ]


def long_signatures(trees: Sources) -> list[str]:
    """Internal functions of more than `PARAMETERS` parameters and kernels of more than `KERNEL_PARAMETERS`.

    `self` and `cls` don't count. Functions that users call (`PUBLIC`) may have more, because their options are
    keyword-only.
    """
    wrong = []
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and f"{name}:{node.name}" not in PUBLIC:
                given = [a.arg for a in (*node.args.posonlyargs, *node.args.args)]
                number = len(given) - (given[:1] in (["self"], ["cls"])) + len(node.args.kwonlyargs)
                limit = KERNEL_PARAMETERS if _on_device(node) else PARAMETERS
                if number > limit:
                    wrong.append(f"{name}:{node.lineno} {node.name}: {number} parameters")
    return wrong


def _on_device(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)


def repeated_classes(trees: Sources) -> list[str]:
    """Names of classes that more than one module defines."""
    places = defaultdict(list)
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(name)
    return [f"class {name}: {', '.join(where)}" for name, where in sorted(places.items()) if len(where) > 1]


def repeated_modules(trees: Sources) -> list[str]:
    """Names of modules that a room has more than once."""
    places = defaultdict(list)
    for name in trees:
        path = Path(name)
        if path.stem not in ("__init__", "__main__"):
            places[path.parts[0], path.stem].append(name)
    return [f"{name}: {', '.join(where)}" for (_, name), where in sorted(places.items()) if len(where) > 1]


def import_circles(trees: Sources) -> list[str]:
    """Circles of modules that import each other at module level, imports under TYPE_CHECKING among them."""
    modules = {_module(name): name for name in trees}
    edges = {module: set(_imported(trees[name], modules)) - {module} for module, name in modules.items()}
    return [" -> ".join(sorted(circle)) for circle in _strongly_connected(edges) if len(circle) > 1]


def folder_circles(trees: Sources) -> list[str]:
    """Circles of folders whose modules import each other, at any place in a module. A module at the top of `tricomm/`
    counts as a folder: the import contract orders these."""
    modules = {_module(name): name for name in trees}
    edges: dict[str, set[str]] = {_folder(name): set() for name in trees}
    for name, tree in trees.items():
        edges[_folder(name)] |= {_folder(modules[other]) for other in _imports(ast.walk(tree), modules)}
    return [" -> ".join(sorted(circle)) for circle in _strongly_connected(edges) if len(circle) > 1]


def _folder(name: str) -> str:
    folder = str(Path(name).parent)
    return name if folder == "tricomm" else folder


def _module(name: str) -> str:
    parts = list(Path(name).with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts if parts[0] in ("tricomm", "devtools") else ["tricomm", *parts])


def _imported(tree: ast.Module, modules: dict[str, str]) -> Iterator[str]:
    return _imports(_at_module_level(tree.body), modules)


def _imports(nodes: Iterable[ast.AST], modules: dict[str, str]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                if whole in modules:
                    yield whole
                elif node.module in modules:
                    yield node.module


def _at_module_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _at_module_level(node.body)
            yield from _at_module_level(node.orelse)


def _strongly_connected(edges: dict[str, set[str]]) -> list[set[str]]:
    """Tarjan's components of the graph, without recursion deeper than the longest chain of imports."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    components: list[set[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(edges[node]):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            at = stack.index(node)
            components.append(set(stack[at:]))
            del stack[at:]

    for node in sorted(edges):
        if node not in index:
            visit(node)
    return components
