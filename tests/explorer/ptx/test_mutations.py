"""Each mutation of a kernel's PTX is PTX again, with the same lines but those that it names."""

from __future__ import annotations

import pytest

from tests.explorer.ptx.corpus import shipped
from tests.explorer.ptx.mutations import everywhere, mutations
from tricomm.explorer.ptx.text.parser import parse
from tricomm.kernels import primitives
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


def test_a_fence():
    (fence,) = [m for m in mutations("fence.acq_rel.sys;\n") if m.kind == "fence"]
    assert fence.apply("fence.acq_rel.sys;\n") == "\n" and fence.line == 1


def test_the_inline_strings_of_the_primitives_stand_in_the_text():
    text = shipped(LL)
    for string, old, new in (
        (primitives._PUT, "st.relaxed.sys.global.v2.b64", "st.global.v2.b64"),
        (primitives._RELEASE, "st.release.sys.global.b64", "st.relaxed.sys.global.b64"),
    ):
        if old in text:
            assert old in string.value and new in everywhere(text, old, new)
    with pytest.raises(ValueError):
        everywhere(text, "no.such", "")
