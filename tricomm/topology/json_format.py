"""The JSON form of a topology: text to values and back. What the values mean is checked by `Topology` itself.

Fields, beside "schema": "tricomm-topology-1":

links     rows of whole numbers: NVLinks between devices i and j
peers     rows of true or false: may device i reach device j's memory
switched  true or false: are the links through NVSwitches
names     optional: product names, one per device
devices   optional, for ranks that share devices: which one each has
kind      optional: what the links make of the devices; refused where they make something else
"""

from __future__ import annotations

import json
from typing import Any

from tricomm.errors import InvalidArgument

SCHEMA = "tricomm-topology-1"
MAX_BYTES = 1 << 20
_NEEDED = ("links", "peers", "switched")
_OPTIONAL = ("names", "devices", "kind")


def parse(text: str, where: str) -> dict[str, Any]:
    """The fields of one topology in `text`, without the schema; `where` says in errors whose text it is.

    Raises `InvalidArgument` for what is no JSON object of this schema: the fields and their types, not their sense.
    """
    if len(text) > MAX_BYTES:
        raise InvalidArgument(f"{where}: more than {MAX_BYTES} characters; a topology takes a few thousand")
    try:
        found = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{where} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise InvalidArgument(f"{where}: a JSON object is needed, not a {type(found).__name__}")
    schema = found.pop("schema", None)
    if schema != SCHEMA:
        raise InvalidArgument(f"{where}: schema {schema!r} is not known; it must be {SCHEMA!r}")
    if "unknown" in found:
        raise InvalidArgument(f"{where} is of a machine whose links are not known: {found['unknown']}")
    missing = [name for name in _NEEDED if name not in found]
    strange = sorted(set(found) - {*_NEEDED, *_OPTIONAL})
    if missing or strange:
        fault = f"there is no {', '.join(missing)}" if missing else f"{', '.join(strange)} is not known"
        raise InvalidArgument(f"{where}: {fault}; needed: {', '.join(_NEEDED)}; optional: {', '.join(_OPTIONAL)}")
    for name in ("links", "peers"):
        table = found[name]
        if not isinstance(table, list) or not all(isinstance(row, list) for row in table):
            raise InvalidArgument(f"{where}: {name} must be a list of rows, each a list")
    for name in ("names", "devices"):
        if not isinstance(found.get(name, []), list):
            raise InvalidArgument(f"{where}: {name} must be a list, one entry per device")
    return found


def render(fields: dict[str, Any]) -> str:
    """JSON for `fields`, one row of a table a line, so that people can read and change it."""
    lines = [f'  "schema": {json.dumps(SCHEMA)}']
    for name, value in fields.items():
        table = isinstance(value, list) and value and isinstance(value[0], list)
        rows = ",\n".join(f"    {json.dumps(row)}" for row in value) if table else ""
        lines.append(f'  "{name}": ' + (f"[\n{rows}\n  ]" if table else json.dumps(value)))
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{', '.join(twice)} is given twice")
    return dict(pairs)
