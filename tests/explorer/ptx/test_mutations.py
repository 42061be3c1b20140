"""Each mutation of a kernel's PTX is PTX again, with the same lines but those that it names."""

from __future__ import annotations

from tests.explorer.ptx.corpus import shipped
from tests.explorer.ptx.mutations import mutations
from tricomm.explorer.ptx.text.parser import parse
from tricomm.perf.machine_code.kernel_report import Variant

LL = Variant("send_ll", "sm_90", "float32", world_size=2)


def test_mutations_of_a_shipped_kernel():
    text = shipped(LL)
    original = parse(text)
    result = mutations(text)
    assert len({m.name for m in result}) == len(result)
    kinds = {"barrier", "order", "scope", "strength", "width", "sequence", "atomicity"}
    assert {m.kind for m in result} == kinds
    for mutation in result[:: 1 + len(result) // 20]:
        changed = mutation.apply(text)
        old, new = text.splitlines(), changed.splitlines()
        different = [n for n, rows in enumerate(zip(old, new, strict=True), 1) if rows[0] != rows[1]]
        assert mutation.line in different and len(different) <= 3, mutation.name
        kept = [
            [(i.line, i.text) for i in k.instructions if i.line not in different] for k in (original, parse(changed))
        ]
        assert kept[0] == kept[1]
