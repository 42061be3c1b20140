"""The keys of machine code: other code has another key, and a key is the same in every process."""

from types import SimpleNamespace

import triton
from triton.runtime.jit import DependenciesFinder

from tricomm.kernels.collectives import registry
from tricomm.kernels.launch import compiler
from tricomm.perf.machine_code import prebuild
from tricomm.perf.machine_code.prebuild import Order


def test_a_key_follows_everything_that_changes_the_code(monkeypatch):
    kernel = registry.find("all_reduce", "one_shot", "simple")
    constexprs = {"WORLD_SIZE": 2, "BLOCK": 512, "LANES": 256, "PTX": True, "OP": "sum", "ELEMENT": "float32"}
    constexprs |= kernel.fixed | compiler.COMPILE_OPTIONS | {"ALIGNED": True}

    def key(bits=32, aligned=True, capability=90, of=kernel, **changed):
        return compiler.key_of(of.function, constexprs | of.fixed | changed, bits, aligned, capability)

    plain = key()
    other = registry.find("all_reduce", "two_shot", "simple")
    changed = [key(bits=16), key(aligned=False), key(capability=100), key(of=other), key(WORLD_SIZE=4), key(BLOCK=256)]
    changed += [key(OP="max"), key(DEPENDENT=True), key(num_warps=4), key(maxnreg=128)]
    monkeypatch.setenv("DISABLE_PTXAS_OPT", "1")
    changed.append(key())
    monkeypatch.delenv("DISABLE_PTXAS_OPT")
    assert key() == plain
    for name in ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH"):  # asked only if a variable names one
        with monkeypatch.context() as patch:
            patch.setattr("triton.backends.nvidia.compiler.get_ptxas", lambda arch: SimpleNamespace(version="99.9"))
            assert key() == plain
            patch.setenv(name, "/opt/ptxas")
            newer = key()
            assert newer != plain
            patch.setattr("triton.backends.nvidia.compiler.get_ptxas", lambda arch: SimpleNamespace(version="99.8"))
            assert key() not in (plain, newer)

            def none(arch):
                raise RuntimeError("Cannot find ptxas")

            patch.setattr("triton.backends.nvidia.compiler.get_ptxas", none)
            assert key() == plain
    monkeypatch.setattr(triton, "__version__", "9.9.9")
    changed.append(key())
    assert len({plain, *changed}) == len(changed) + 1


def keys_of_a_barrier(monkeypatch):
    """The key of a kernel in a process that has compiled nothing, and in one that has compiled another kernel. Triton
    hashes as its versions 3.6 and 3.7 do."""
    wrong = DependenciesFinder._update_hash

    def early(self, function):
        known = {} if function.hash is None else function.used_global_vals
        wrong(self, function)  # it makes the function's key first
        for name in function.used_global_vals.keys() - known:
            self.used_global_vals.pop(name, None)

    def key(of):
        form = next(form for _, form in prebuild.ordered(Order("sm_90", 2, "ddp", (of,))))
        return compiler.key_of(form.kernel, form.constexprs, form.bits, form.aligned, 90)

    def forget():
        compiler._keyed.clear()
        for kernel in registry.KERNELS:
            for function in compiler._functions(kernel.function, set()):
                function.hash, function.used_global_vals = None, {}

    with monkeypatch.context() as patch:
        patch.setattr(DependenciesFinder, "_update_hash", early)
        forget()
        alone = key("barrier")
        forget()
        key("all_reduce")
        after = key("barrier")
    forget()
    return alone, after


def test_a_key_does_not_depend_on_kernels_compiled_before(monkeypatch):
    monkeypatch.setattr(compiler, "_KEYS_DEPEND_ON_ORDER", True)
    alone, after = keys_of_a_barrier(monkeypatch)
    assert alone == after


def test_by_the_hashes_of_old_versions_it_would(monkeypatch):
    monkeypatch.setattr(compiler, "_KEYS_DEPEND_ON_ORDER", False)
    alone, after = keys_of_a_barrier(monkeypatch)
    assert alone != after
