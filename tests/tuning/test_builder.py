"""The builder: what is built, what is refused, and what a bad candidate costs."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest
from tvm_fusion.schedules.registry import spaces

from tvm_fusion.build.library import load_library
from tvm_fusion.compat import relax, tvm
from tvm_fusion.targets import parse_target
from tvm_fusion.tuning import builder as builder_module
from tvm_fusion.tuning.build_worker import build, load_function
from tvm_fusion.tuning.builder import Builder
from tvm_fusion.tuning.measure import BuildFailure, BuildRequest, Built


def decided(source, count):
    """Candidates of the first template of a kernel, best predicted first."""
    space = spaces(load_function(source.func_json), parse_target(source.target))[0]
    return [
        BuildRequest(source, space.template, decision)
        for decision in space.points[0].options[:count]
    ]


@pytest.fixture(scope="module")
def faulty():
    """A builder whose workers know templates that go wrong."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder_module, "_MODULE", "faulty_worker")
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        builder = Builder(workers=1)
    with builder:
        yield builder


def test_candidates_in_order_each_computing_the_kernel(kernels, tmp_path):
    source = kernels.dense()
    requests = [*decided(source, 3), BuildRequest(source)]
    with Builder(workers=2, folder=tmp_path) as builder:
        made = builder.build(requests)
        again = builder.build(requests[:1])
    x, w, b = (
        np.random.default_rng(0).standard_normal(s).astype("float32")
        for s in ((32, 64), (64, 128), (128,))
    )
    for built in made:
        assert isinstance(built, Built) and built.registers is None
        out = tvm.runtime.tensor(np.zeros((32, 128), "float32"))
        load_library(built.artifact)["main"](*map(tvm.runtime.tensor, (x, w, b)), out)
        np.testing.assert_allclose(out.numpy(), np.maximum(x @ w + b, 0), atol=1e-4)
        # Plain TVM loads it too.
        assert tvm.runtime.load_module(str(built.artifact)).implements_function("main", True)
    # The best predicted candidate is what is compiled without tuning: known by its code.
    digests = [built.code_digest for built in made]
    assert digests[0] == digests[3] and len(set(digests[:3])) == 3
    assert again[0] == made[0]


def test_files_go_with_the_builder(kernels):
    request = BuildRequest(kernels.dense())
    with Builder(workers=1) as builder:
        one, two = builder.build([request, request])
        assert one == two and one.artifact.exists()
    assert not one.artifact.exists()


def test_a_decision_that_is_none_is_rejected(kernels, builder):
    source = kernels.dense()
    (good,) = decided(source, 1)
    name = good.decision[0][0]
    wrong = BuildRequest(source, good.template, ((name, 7), *good.decision[1:]))
    unknown = BuildRequest(source, "no such template")
    made = builder.build([wrong, good, unknown])
    assert [getattr(m, "verdict", "built") for m in made] == ["rejected", "built", "rejected"]
    assert "no such template" in made[2].message


def test_workers_find_the_same_spaces_as_the_templates_here(kernels, builder):
    source = kernels.dense()
    (found,) = builder.find_spaces([source])
    here = spaces(load_function(source.func_json), parse_target(source.target))
    assert found.result() == tuple(here) and len(here[0].points[0].options) > 1


def test_spaces_of_a_damaged_source_are_a_message(kernels, builder):
    source = dataclasses.replace(kernels.dense(), kernel="0" * 16, func_json="{")
    (found,) = builder.find_spaces([source])
    assert isinstance(found.result(), str) and found.result()


def test_each_bad_template_costs_one_candidate_and_is_named(kernels, faulty, monkeypatch):
    source = kernels.dense()
    good = BuildRequest(source)
    assert isinstance(faulty.build([good])[0], Built)
    names = ["hangs", "crashes", "refuses", "stumbles"]
    monkeypatch.setattr(faulty, "_timeout_s", 3)
    made = faulty.build([r for name in names for r in (BuildRequest(source, name), good)])
    assert all(isinstance(m, Built) for m in made[1::2])
    assert [(m.verdict, m.message) for m in made[::2]] == [
        ("timeout", "took more than 3 s"),
        ("crashed", "died of SIGSEGV"),
        ("rejected", "template refuses does not take this function as decided"),
        ("compiler", "ZeroDivisionError: a mistake of ours"),
    ]


def test_damaged_source_is_a_failure(kernels, builder):
    source = kernels.dense()
    damaged = type(source)("0" * 16, source.func_json[:200], source.target)
    bad, good = builder.build([BuildRequest(damaged), BuildRequest(source)])
    assert bad.verdict in ("compiler", "crashed") and isinstance(good, Built)


# ------------------------------------------------------------------ CUDA


def scaled_rows(kernels, rows: int, columns: int):
    """x / sum(x), row by row: a thread that holds its row keeps all values until the end."""

    def make(builder, x):
        total = builder.emit(relax.op.sum(x, axis=1, keepdims=True))
        return builder.emit(relax.op.divide(x, total))

    return kernels.of([(rows, columns)], "float32", make, "cuda:sm_80")


@pytest.mark.nvcc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_resources_and_machine_code_of_a_gpu_kernel(kernels, builder, arch):
    source = kernels.dense(f"cuda:{arch}", "float16")
    built, other = builder.build([BuildRequest(source), *decided(source, 2)[1:]])
    assert 16 <= built.registers <= 255 and built.spill_bytes == 0 and built.shared_bytes > 0
    assert built.code_digest != other.code_digest
    # The machine code follows the library, for machines without a compiler.
    assert built.artifact.read_bytes().count(b"\x7fELF") >= 2


@pytest.mark.nvcc
def test_candidates_that_spill_or_take_too_much_shared_memory_are_not_built(kernels, faulty):
    rows = scaled_rows(kernels, 1024, 256)
    small, large = scaled_rows(kernels, 64, 128), scaled_rows(kernels, 512, 128)
    made = faulty.build(
        [
            BuildRequest(rows, "spills"),
            BuildRequest(small, "shares"),
            BuildRequest(large, "shares"),
            BuildRequest(large, "shares_more"),
        ]
    )
    spilling, fitting, static, dynamic = made
    assert spilling.verdict == "spills" and spilling.spill_bytes > 0 and spilling.registers > 0
    assert isinstance(fitting, Built) and fitting.shared_bytes >= 64 * 128 * 4
    assert (static.verdict, dynamic.verdict) == ("shared_memory", "shared_memory")
    assert dynamic.shared_bytes >= 512 * 128 * 4


@pytest.mark.nvcc
def test_launch_parameters_count_as_code(kernels, tmp_path):
    """Equal machine code with another grid is another candidate."""
    target = parse_target("cuda:sm_80")
    digests = set()
    for rows in (4096, 8192):
        source = kernels.of(
            [(rows, 256)], "float32", lambda b, x: b.emit(relax.op.nn.relu(x)), "cuda:sm_80"
        )
        func = load_function(source.func_json)
        digests.add(build(func, target, "", (), tmp_path / f"{rows}.so").code_digest)
    assert len(digests) == 2


def test_a_gpu_target_without_nvcc_is_the_compilers_failure(kernels, tmp_path, monkeypatch):
    from tvm_fusion.build import ptxas
    from tvm_fusion.errors import CompilerError

    def missing():
        raise CompilerError("nvcc is not installed; install it")

    monkeypatch.setattr(ptxas, "find_nvcc", missing)
    source = kernels.dense("cuda:sm_80", "float16")
    target = parse_target("cuda:sm_80")
    made = build(load_function(source.func_json), target, "", (), tmp_path / "x.so")
    assert made == BuildFailure("compiler", "nvcc is not installed; install it")
    assert not (tmp_path / "x.so").exists()
