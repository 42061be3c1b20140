"""Every form of a memory access, in warps and blocks, watched and not, compared with the contents of NumPy arrays."""

import numpy as np
import pytest

from tests.explorer.ptx.execution import turns
from tests.explorer.ptx.execution.handwritten import kernel, run
from tricomm.errors import InvalidArgument
from tricomm.explorer.ptx.global_memory import BadAddress, GlobalMemory
from tricomm.explorer.ptx.units import grid

HOW = pytest.mark.parametrize("unit, watched", [("warp", False), ("block", False), ("warp", True)])
TID = "mov.u32 %r0, %tid.x;"
MODES = ["", ".volatile", ".relaxed.sys", ".cg", ".L1::no_allocate", ".weak"]


def octets(count, seed=1):
    """As many random ones, at a multiple of 32."""
    memory = np.random.default_rng(seed).integers(0, 256, count + 32, dtype="u1")
    return memory[-memory.ctypes.data % 32 :][:count]


WIDTHS = [("b8", "%r1"), ("b16", "%rs1"), ("b32", "%r1"), ("b64", "%rd9"), ("b128", "%rq1")]
FORMS = [(*w, mode) for w in WIDTHS for mode in MODES if w[0] != "b128" or mode in ("", ".relaxed.sys")]


@HOW
@pytest.mark.parametrize("kind, register, mode", FORMS)
def test_loads_and_stores_of_every_width(kind, register, mode, unit, watched):
    size = int(kind[1:]) // 8
    source, target = octets(64 * size), octets(64 * size, 2)
    loads = mode if "no_allocate" in mode or mode != ".cg" else ".cg"
    text = f"""{TID} mul.wide.u32 %rd10, %r0, {size}; add.s64 %rd11, %rd0, %rd10; add.s64 %rd12, %rd1, %rd10;
        ld{_between(loads, "global")}.{kind} {register}, [%rd11];
        st{_between(mode, "global")}.{kind} [%rd12], {register};"""
    run(kernel(text, 2), [source, target], 64, unit=unit, watched=watched)
    assert target.tobytes() == source.tobytes()


def _between(mode, space):
    """A memory order is written before the space, a cache operator after it."""
    return f"{mode}.{space}" if mode in (".volatile", ".relaxed.sys", ".weak") else f".{space}{mode}"


ORDERS = {
    "tid": ("mov.u32 %r1, %r0;", lambda n: n),
    "31 - tid": ("sub.u32 %r1, 31, %r0;", lambda n: 31 - n),
    "scattered": ("mul.lo.u32 %r1, %r0, 5; xor.b32 %r1, %r1, 9; and.b32 %r1, %r1, 31;", lambda n: (n * 5 ^ 9) & 31),
    "masked": ("mov.u32 %r1, %r0;", lambda n: n),
    "same": ("mov.u32 %r1, 3;", lambda n: 3),
}


@HOW
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "elements, kind", [(2, "b32"), (4, "b32"), (2, "b64"), (4, "b64"), (8, "b32"), (4, "b8"), (2, "b16")]
)
def test_vectors_in_every_order(elements, kind, order, unit, watched):
    """Lane n reads element vector f(n) and writes it to place n; with "masked" only some lanes do."""
    size, threads = int(kind[1:]) // 8, 32
    width = size * elements
    source, target = octets(threads * width), octets(threads * width, 2)
    letter = {1: "%r", 2: "%rs", 4: "%r", 8: "%rd"}[size]
    names = ", ".join(f"{letter}{20 + n}" for n in range(elements))
    place, f = ORDERS[order]
    zeros = "".join(f"mov.b{max(16, 8 * size)} {letter}{20 + n}, 0;" for n in range(elements)).replace(
        "b16 %r2", "b32 %r2"
    )
    guard = "and.b32 %r2, %r0, 5; setp.ne.u32 %p0, %r2, 1;" if order == "masked" else "setp.eq.u32 %p0, 0, 0;"
    text = f"""{TID} {place} {guard} {zeros} mul.wide.u32 %rd10, %r1, {width}; add.s64 %rd11, %rd0, %rd10;
        mul.wide.u32 %rd12, %r0, {width}; add.s64 %rd13, %rd1, %rd12;
        @%p0 ld.global.v{elements}.{kind} {{{names}}}, [%rd11]; st.global.v{elements}.{kind} [%rd13], {{{names}}};"""
    run(kernel(text, 2), [source, target], threads, unit=unit, watched=watched)
    rows = source.reshape(threads, width)
    chosen = [order != "masked" or n & 5 != 1 for n in range(threads)]
    expected = np.stack([rows[f(n)] if chosen[n] else 0 * rows[0] for n in range(threads)])
    assert target.tobytes() == expected.tobytes()


@HOW
@pytest.mark.parametrize("kind, bits", [("u8", 8), ("s8", 8), ("u16", 16), ("s16", 16)])
@pytest.mark.parametrize("same", [False, True])
def test_narrow_loads_are_extended(kind, bits, same, unit, watched):
    source, target = octets(128), np.zeros(32, "u4")
    place = "mov.u32 %r1, 3;" if same else "mov.u32 %r1, %r0;"
    text = f"""{TID} {place} mul.wide.u32 %rd10, %r1, {bits // 8}; add.s64 %rd11, %rd0, %rd10;
        ld.global.{kind} %r2, [%rd11+{bits // 8}]; mul.wide.u32 %rd12, %r0, 4; add.s64 %rd13, %rd1, %rd12;
        st.global.u32 [%rd13], %r2;"""
    run(kernel(text, 2), [source, target], 32, unit=unit, watched=watched)
    values = source.view(f"{'u' if kind[0] == 'u' else 'i'}{bits // 8}").astype("i8")
    expected = [int(values[(3 if same else n) + 1]) & 0xFFFFFFFF for n in range(32)]
    assert target.tolist() == expected


@HOW
def test_shared_memory_of_two_kinds_and_generic_addresses(unit, watched):
    """Static and dynamic shared memory; a generic address finds shared, local and global memory."""
    variables = ".shared .align 8 .b8 fixed[64]; .extern .shared .align 16 .b8 dynamic[];"
    target = np.zeros(32, "u4")
    text = f"""{TID} .local .align 4 .b8 own[16];
        mov.b32 %r1, dynamic; shl.b32 %r2, %r0, 2; add.u32 %r3, %r1, %r2; st.shared.u32 [%r3], %r0;
        mov.b64 %rd9, fixed; st.shared.u32 [fixed+4], 7; bar.sync 0;
        cvt.u64.u32 %rd10, %r3; cvta.shared.u64 %rd11, %rd10; ld.u32 %r4, [%rd11];
        mov.b64 %rd12, own; cvta.local.u64 %rd13, %rd12; add.u32 %r5, %r0, 100; st.u32 [%rd13+8], %r5;
        ld.local.u32 %r6, [own+8];
        cvta.to.shared.u64 %rd14, %rd11; ld.shared.u32 %r7, [%rd14]; ld.shared.u32 %r8, [fixed+4];
        setp.lt.u32 %p4, %r0, 16; selp.b64 %rd15, %rd11, %rd13, %p4;
        @!%p4 add.s64 %rd15, %rd15, 8; ld.u32 %r9, [%rd15];
        mad.lo.u32 %r10, %r4, 3, %r6; add.u32 %r10, %r10, %r7; mad.lo.u32 %r10, %r8, 1000, %r10;
        add.u32 %r10, %r10, %r9;
        cvt.u64.u32 %rd16, %r2; add.s64 %rd17, %rd0, %rd16; st.u32 [%rd17], %r10;"""
    run(kernel(text, 1, variables), [target], 32, unit=unit, watched=watched, shared=128)
    expected = [n * 3 + n + 100 + n + 7000 + (n if n < 16 else n + 100) for n in range(32)]
    assert target.tolist() == expected


def test_constants_and_parameters_of_many_widths():
    variables = ".const .align 4 .b8 table[8] = {1, 2, 3, 4, 5, 6, 7, 8};"
    text = f"""{TID} ld.const.u32 %r1, [table+4]; and.b32 %r2, %r0, 3; cvt.u64.u32 %rd9, %r2; mov.b64 %rd10, table;
        add.s64 %rd10, %rd10, %rd9; ld.const.u8 %r3, [%rd10]; ld.param.u16 %rs1, [p1+2]; cvt.u32.u16 %r4, %rs1;
        ld.param.v2.u32 {{%r5, %r6}}, [p1]; ld.param.s8 %r7, [p1+7]; xor.b32 %r8, %r5, %r6; xor.b32 %r8, %r8, %r7;
        add.u32 %r1, %r1, %r3; add.u32 %r1, %r1, %r4; add.u32 %r1, %r1, %r8;
        mul.wide.u32 %rd11, %r0, 4; add.s64 %rd12, %rd0, %rd11; st.global.u32 [%rd12], %r1;"""
    target = np.zeros(32, "u4")
    run(kernel(text, 2, variables), [target, 0xF1E2D3C4B5A69788])
    mixed = 0xB5A69788 ^ 0xF1E2D3C4 ^ 0xFFFFFFF1
    assert target.tolist() == [(0x08070605 + 1 + n % 4 + 0xB5A6 + mixed) & 0xFFFFFFFF for n in range(32)]


ATOMICS = [
    ("add", "u32", lambda a, b: a + b),
    ("min", "s32", lambda a, b: min(_s(a), _s(b))),
    ("max", "u32", max),
    ("and", "b32", lambda a, b: a & b),
    ("or", "b32", lambda a, b: a | b),
    ("xor", "b32", lambda a, b: a ^ b),
    ("exch", "b32", lambda a, b: b),
    ("inc", "u32", lambda a, b: 0 if a >= b else a + 1),
    ("dec", "u32", lambda a, b: b if a == 0 or a > b else a - 1),
    ("add", "s32", lambda a, b: a + b),
]


def _s(value):
    return value - (1 << 32) if value >> 31 else value


@HOW
@pytest.mark.parametrize("op, kind, model", ATOMICS, ids=lambda v: v if isinstance(v, str) else "")
def test_atomics_lane_after_lane(op, kind, model, unit, watched):
    """All lanes share three words; the old values are returned."""
    memory, old = np.array([5, 0x80000001, 77], "u4"), np.zeros(32, "u4")
    text = f"""{TID} rem.u32 %r1, %r0, 3; mul.wide.u32 %rd9, %r1, 4; add.s64 %rd10, %rd0, %rd9;
        mul.lo.u32 %r2, %r0, 0x9E3779B1; atom.global.gpu.acq_rel.{op}.{kind} %r3, [%rd10], %r2;
        mul.wide.u32 %rd11, %r0, 4; add.s64 %rd12, %rd1, %rd11; st.global.u32 [%rd12], %r3;
        {"" if op == "exch" else f"red.global.{op}.{kind} [%rd0], 3;"}"""
    expected, words = [], [5, 0x80000001, 77]
    for n in range(32):
        expected.append(words[n % 3])
        words[n % 3] = model(words[n % 3], n * 0x9E3779B1 & 0xFFFFFFFF) & 0xFFFFFFFF
    if op != "exch":
        for _ in range(32):
            words[0] = model(words[0], 3) & 0xFFFFFFFF
    run(kernel(text, 2), [memory, old], unit=unit, watched=watched)
    assert old.tolist() == expected and memory.tolist() == words


@HOW
def test_compare_and_swap_of_16_to_128_bits(unit, watched):
    """Each lane takes its turn: lane n finds n and leaves n + 1."""
    memory, old = np.zeros(8, "u8"), np.zeros(32, "u8")
    memory[4] = 99
    text = f"""{TID} cvt.u16.u32 %rs0, %r0; add.u16 %rs1, %rs0, 1; atom.global.cas.b16 %rs2, [%rd0], %rs0, %rs1;
        add.u32 %r1, %r0, 1; atom.global.cas.b32 %r2, [%rd0+8], %r0, %r1;
        cvt.u64.u32 %rd9, %r0; cvt.u64.u32 %rd10, %r1; atom.cas.b64 %rd11, [%rd0+16], %rd9, %rd10;
        mov.b64 %rd12, 99; mov.b128 %rq0, {{%rd12, %rd9}}; mov.b128 %rq1, {{%rd12, %rd10}};
        atom.global.sys.acq_rel.cas.b128 %rq2, [%rd0+32], %rq0, %rq1; mov.b128 {{%rd13, %rd14}}, %rq2;
        cvt.u64.u16 %rd15, %rs2; add.s64 %rd15, %rd15, %rd14; cvt.u64.u32 %rd16, %r2; add.s64 %rd15, %rd15, %rd16;
        add.s64 %rd15, %rd15, %rd11; add.s64 %rd15, %rd15, %rd13;
        shl.b64 %rd17, %rd9, 3; add.s64 %rd18, %rd1, %rd17; st.global.b64 [%rd18], %rd15;"""
    run(kernel(text, 2), [memory, old], unit=unit, watched=watched)
    assert old.tolist() == [4 * n + 99 for n in range(32)]
    assert memory.tolist() == [32, 32, 32, 0, 99, 32, 0, 0]


@HOW
def test_atomics_of_floats_and_pairs(unit, watched):
    memory = np.zeros(8, "u4")
    memory[:2] = np.array([0.5, 16.25], "f4").view("u4")
    text = f"""{TID} cvt.rn.f32.u32 %f0, %r0; atom.global.add.f32 %f1, [%rd0], %f0;
        red.global.add.noftz.f16x2 [%rd0+8], 0x3C004000; red.global.v2.f32.add [%rd0+16], {{%f0, %f0}};"""
    text = text.replace("v2.f32.add", "add.v2.f32")
    run(kernel(text), [memory], unit=unit, watched=watched)
    assert memory.view("f4")[[0, 4, 5]].tolist() == [496.5, 496.0, 496.0]
    assert memory.view("f2")[4:6].tolist() == [64.0, 32.0]


@HOW
def test_copies_are_complete_after_their_wait(unit, watched):
    source, target = np.arange(1, 65, dtype="u4"), np.zeros(96, "u4")
    text = f"""{TID} shl.b32 %r1, %r0, 2; mul.wide.u32 %rd9, %r0, 4; add.s64 %rd10, %rd0, %rd9; st.shared.u32 [%r1], 0;
        cp.async.ca.shared.global [%r1], [%rd10], 4; cp.async.commit_group;
        add.u32 %r2, %r1, 128; add.s64 %rd11, %rd10, 128; cp.async.ca.shared.global [%r2], [%rd11], 4, 2;
        cp.async.commit_group; ld.shared.u32 %r3, [%r1]; cp.async.wait_group 1; ld.shared.u32 %r4, [%r1];
        cp.async.wait_all; ld.shared.u32 %r5, [%r2];
        add.s64 %rd12, %rd1, %rd9; st.global.u32 [%rd12], %r3; st.global.u32 [%rd12+128], %r4;
        st.global.u32 [%rd12+256], %r5;"""
    source[32:] |= 0x70000
    run(kernel(text, 2), [source, target], unit=unit, watched=watched, shared=256)
    assert target.tolist() == [0] * 32 + list(range(1, 33)) + list(range(33, 65))


@HOW
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_matrices(count, transposed, unit, watched):
    """Rows are in reversed order; the loaded matrices are stored at another place."""
    source, loaded, back = octets(128 * count), np.zeros(32 * count, "u4"), np.zeros(32 * count, "u4")
    names = ", ".join(f"%r{20 + n}" for n in range(count))
    copy = "".join(
        f"st.global.u32 [%rd12+{128 * n}], %r{20 + n}; add.u32 %r3, %r1, {2048 + 128 * n}; " for n in range(count)
    )
    mode = ".trans" if transposed else ""
    text = f"""{TID} mul.wide.u32 %rd9, %r0, {4 * count}; add.s64 %rd10, %rd0, %rd9; mul.lo.u32 %r1, %r0, {4 * count};
        {"".join(f"ld.global.u32 %r2, [%rd10+{4 * n}]; st.shared.u32 [%r1+{4 * n}], %r2;" for n in range(count))}
        bar.sync 0; and.b32 %r4, %r0, {8 * count - 1}; sub.u32 %r5, {8 * count - 1}, %r4; shl.b32 %r5, %r5, 4;
        ldmatrix.sync.aligned.m8n8.x{count}{mode}.shared.b16 {{{names}}}, [%r5];
        mul.wide.u32 %rd11, %r0, 4; add.s64 %rd12, %rd1, %rd11; {copy}
        add.u32 %r6, %r5, 1024; stmatrix.sync.aligned.m8n8.x{count}{mode}.shared.b16 [%r6], {{{names}}}; bar.sync 0;
        add.s64 %rd13, %rd2, %rd9; add.u32 %r7, %r1, 1024;
        {"".join(f"ld.shared.u32 %r2, [%r7+{4 * n}]; st.global.u32 [%rd13+{4 * n}], %r2;" for n in range(count))}"""
    run(kernel(text, 3), [source, loaded, back], unit=unit, watched=watched, shared=4096)
    assert back.tobytes() == source.tobytes()
    rows = source.view("u2").reshape(count, 8, 8)[::-1, ::-1]
    for lane in range(32):
        for n in range(count):
            i, j = lane // 4, 2 * (lane % 4)
            pair = (rows[n][j][i], rows[n][j + 1][i]) if transposed else (rows[n][i][j], rows[n][i][j + 1])
            assert loaded[32 * n + lane] == int(pair[0]) | int(pair[1]) << 16


def test_multimem_reads_and_writes_every_member():
    members = [np.arange(32, dtype="u4") + 100 * k for k in range(3)]
    out, memory = np.zeros(32, "u4"), GlobalMemory()
    for number, array in enumerate([*members, out]):
        memory.add(array.ctypes.data, array.nbytes, f"array {number}")
    memory.add_multicast(1 << 50, 128, [m.ctypes.data for m in members])
    code = kernel(
        f"""{TID} mul.wide.u32 %rd9, %r0, 4; add.s64 %rd10, %rd0, %rd9; add.s64 %rd11, %rd1, %rd9;
        multimem.ld_reduce.relaxed.sys.global.add.u32 %r1, [%rd10]; st.global.u32 [%rd11], %r1;
        multimem.red.release.sys.global.add.u32 [%rd10], 1; setp.lt.u32 %p0, %r0, 4;
        @%p0 multimem.st.relaxed.sys.global.u32 [%rd10], 9;""",
        2,
    )
    loaded = grid.LoadedKernel(code, memory)
    words = (1 << 50).to_bytes(8, "little") + out.ctypes.data.to_bytes(8, "little")
    turns.run([grid.launch(loaded, (1, 1, 1), (32, 1, 1), 0, words)])
    assert out.tolist() == [3 * n + 300 for n in range(32)]
    for k, member in enumerate(members):
        assert member.tolist() == [9 if n < 4 else n + 100 * k + 1 for n in range(32)]


@HOW
@pytest.mark.parametrize("what", ["load", "store", "atomic", "shared"])
def test_accesses_out_of_bounds_are_errors(what, unit, watched):
    text = {
        "load": "ld.global.u32 %r1, [%rd10];",
        "store": "st.global.u32 [%rd10], 1;",
        "atomic": "red.global.add.u32 [%rd10], 1;",
        "shared": "st.shared.u32 [%r9], 1;",
    }[what]
    source = np.zeros(31, "u4")
    body = f"{TID} mul.wide.u32 %rd9, %r0, 4; add.s64 %rd10, %rd0, %rd9; shl.b32 %r9, %r0, 2; {text}"
    with pytest.raises(
        BadAddress, match=f"{text.split()[0]}.*PTX line.*" + ("shared memory" if what == "shared" else "argument 0")
    ):
        run(kernel(body), [source], unit=unit, watched=watched, shared=124)


def test_misaligned_addresses_are_errors():
    for text in (
        "ld.global.u32 %r1, [%rd0+2];",
        f"{TID} cvt.u64.u32 %rd9, %r0; add.s64 %rd9, %rd9, %rd0; ld.u32 %r1, [%rd9];",
    ):
        with pytest.raises(BadAddress, match="not a multiple of 4"):
            run(kernel(text), [np.zeros(64, "u4")])


def refused(text, match):
    code = kernel(text)
    with pytest.raises(InvalidArgument, match=match):
        grid.refuse_unknown(code)


@pytest.mark.parametrize(
    "text",
    [
        "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%fd0, %fd1}, {%fd2}, {%fd3}, {%fd0, %fd1};",
        "mapa.shared::cluster.u64 %rd1, %rd0, 0;",
        "wgmma.fence.sync.aligned;",
        "barrier.cluster.arrive;",
        "cp.async.bulk.commit_group;",
        "mbarrier.init.shared.b64 [%r0], 1;",
        "cp.async.mbarrier.arrive.shared.b64 [%r1];",
        "match.any.sync.b32 %r0, %r1, -1;",
        "isspacep.shared %p0, %rd0;",
        "fns.b32 %r0, %r1, %r2, %r3;",
        "ld.global.u32.strange %r0, [%rd0];",
        "atom.global.mul.u32 %r0, [%rd0], 3;",
        "shfl.idx.b32 %r0, %r1, 0, 31;",
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r0], %r1, [%r2];",
    ],
)
def test_unknown_instructions_are_refused_by_name(text):
    refused(text, r"(?s)kernel k.*PTX line|PTX line.*kernel k")


@pytest.mark.parametrize(
    "text",
    [
        "ld.global.u32 %r1, %r2;",
        "st.global.u32 %r2, %r1;",
        "red.global.add.u32 %r1, 1;",
        "cp.async.ca.shared.global %r1, [%rd1], 16;",
        "cp.async.ca.shared.global [%r1], %rd1, 16;",
    ],
)
def test_an_operand_that_has_to_be_an_address_is_named(text):
    refused(text, r"(?s)kernel k.*PTX line.*an address in brackets is expected")
