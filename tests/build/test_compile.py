"""Compilation: numbers, kernel counts, export, plain TVM, failures that leave a group out."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys

import numpy as np
import pytest

import tvm_fusion as tf
from tvm_fusion.build.executable import device_sources
from tvm_fusion.build.model import (
    drop_groups,
    failing_kernels,
    last_line,
    lower_plan,
    unfused_plan,
)
from tvm_fusion.compat import codegen, relax, tvm
from tvm_fusion.errors import InvalidModelError, LoweringError, PlanError, TargetError
from tvm_fusion.planner import Plan, Rejection
from tvm_fusion.targets import parse_target, runs_here
from tvm_fusion.testing.modules import ModuleBuilder, kernel_calls, parallel_convs, random_module
from tvm_fusion.transform import schedule_groups


def residual():
    b = ModuleBuilder()
    x = b.input("x", (1, 8, 9, 9))
    y = b.relu("r1", b.bias("b1", b.conv("c1", x, 8)))
    return b.finish(b.relu("r2", b.add("add", b.bias("b2", b.conv("c2", y, 8)), x)))


def data(module, seed=0):
    rng = np.random.default_rng(seed)
    return [
        rng.standard_normal([int(d) for d in p.ty.shape]).astype(str(p.ty.dtype))
        for p in module["main"].params
    ]


def test_compiled_model_runs_and_names_its_templates():
    compiled = tf.compile(residual(), "llvm")
    assert all(g.template for g in compiled.plan.groups)
    (out,) = compiled(*data(residual()))
    assert out.shape == (1, 8, 9, 9) and np.isfinite(out).all()


def test_a_plan_may_be_tvms_own_pipeline(tmp_path):
    """What tuning found faster than any plan is compiled without a kernel of this package."""
    module = parallel_convs(2, channels=8, spatial=6)
    ours = tf.compile(module, "llvm", verify=False)
    plan = dataclasses.replace(unfused_plan(ours.plan), pipeline="tvm")
    assert Plan.from_json(plan.to_json()) == plan
    stock = tf.compile(module, "llvm", plan=plan, verify=False)
    assert stock.kernels == {} and stock.plan == plan
    stock.export(tmp_path / "stock.so")
    x = np.random.default_rng(0).standard_normal((1, 8, 6, 6)).astype("float32")
    np.testing.assert_allclose(
        tf.load(tmp_path / "stock.so")(x)[0], ours(x)[0], rtol=1e-4, atol=1e-4
    )
    text = json.dumps(json.loads(plan.to_json()) | {"pipeline": "none"})
    with pytest.raises(PlanError, match="unknown pipeline 'none'"):
        Plan.from_json(text)
    grouped = dataclasses.replace(ours.plan, pipeline="tvm")
    with pytest.raises(PlanError, match="groups and TVM's own pipeline"):
        Plan.from_json(grouped.to_json())


def test_one_call_per_group():
    module = residual()
    plan = tf.plan(module, "llvm")
    lowered = lower_plan(module, plan, parse_target("llvm"))
    assert len(kernel_calls(lowered.mod)) == plan.totals.launches_after == 2


def test_several_outputs():
    module = parallel_convs(3, channels=4, outputs=[2, 4, 6], spatial=7, relu=True, join=None)
    outs = tf.compile(module, "llvm")(*data(module))
    assert [o.shape[1] for o in outs] == [2, 4, 6]


def test_the_library_runs_with_plain_tvm(tmp_path):
    module, path = residual(), tmp_path / "model.so"
    compiled = tf.compile(module, "llvm", verify=False)
    compiled.export(path)
    x = data(module)
    np.save(tmp_path / "x.npy", x[0])
    np.save(tmp_path / "y.npy", compiled(*x)[0])
    script = (
        "import sys, numpy as np, tvm\n"
        "from tvm import relax\n"
        f"vm = relax.VirtualMachine(tvm.runtime.load_module({str(path)!r}), tvm.cpu())\n"
        f"y = vm['main'](tvm.runtime.tensor(np.load({str(tmp_path / 'x.npy')!r}))).numpy()\n"
        f"assert np.array_equal(y, np.load({str(tmp_path / 'y.npy')!r}))\n"
        "assert not any(name.startswith('tvm_fusion') for name in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=tmp_path, capture_output=True)


def test_load_gives_the_same_model_back(tmp_path):
    module, path = residual(), tmp_path / "model.so"
    compiled = tf.compile(module, "llvm", verify=False)
    compiled.export(path)
    loaded = tf.load(path)
    assert loaded.signature == compiled.signature
    assert np.array_equal(loaded(*data(module))[0], compiled(*data(module))[0])


def test_bad_libraries_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        tf.load(tmp_path / "none.so")
    junk = tmp_path / "junk.so"
    junk.write_bytes(b"not a library")
    with pytest.raises(InvalidModelError, match="not a compiled library"):
        tf.load(junk)
    junk.write_bytes(b"\x7fELF" + b"\0" * 200)
    with pytest.raises(InvalidModelError, match="damaged, or not from"):
        tf.load(junk)


@pytest.mark.parametrize("seed", range(6))
def test_damaged_libraries_never_reach_the_loader(tmp_path, seed):
    path = tmp_path / "model.so"
    tf.compile(residual(), "llvm", verify=False).export(path)
    whole, rng = bytearray(path.read_bytes()), np.random.default_rng(seed)
    if seed % 2:
        whole = whole[: rng.integers(5, len(whole))]
    else:
        whole[int(rng.integers(4, len(whole)))] ^= 0xFF
    path.write_bytes(bytes(whole))
    with pytest.raises(InvalidModelError, match="damaged, or not from"):
        tf.load(path)


def test_wrong_inputs_are_refused_before_compiled_code_sees_them():
    compiled = tf.compile(residual(), "llvm", verify=False)
    x = data(residual())[0]
    with pytest.raises(ValueError, match="takes 1 inputs"):
        compiled()
    with pytest.raises(TypeError, match="must be float32, got float64"):
        compiled(x.astype("float64"))
    with pytest.raises(ValueError, match=r"must have shape \[1, 8, 9, 9\]"):
        compiled(x[:, :4])


def test_a_group_without_a_template_is_left_out(monkeypatch):
    real = schedule_groups.schedule

    def picky(func, target):
        if int(func.attrs.get("tvm_fusion.depth", 0)) == 4:
            raise LoweringError("no schedule template makes one kernel of it")
        return real(func, target)

    monkeypatch.setattr(schedule_groups, "schedule", picky)
    module = residual()
    with pytest.warns(RuntimeWarning, match="fused_cross_0 is left unfused"):
        compiled = tf.compile(module, "llvm", verify=False)
    assert [g.id for g in compiled.plan.groups] == ["fused_vertical_0"]
    assert compiled.plan.rejected[-1].reason == "no_template"
    assert compiled.plan.totals.launches_after == 1 + 4
    dropped = {u.node: u.reason for u in compiled.plan.ungrouped}
    assert dropped == dict.fromkeys(("c2", "b2", "add", "r2"), "no_template")
    with pytest.raises(LoweringError, match="left unfused"):
        tf.compile(module, "llvm", verify=False, strict=True)


def test_dropping_a_group_puts_its_numbers_back():
    plan = tf.plan(residual(), "llvm")
    refusals = {
        g.id: Rejection(g.strategy, g.nodes, "illegal", "numerics", {}, "wrong")
        for g in plan.groups
    }
    totals = drop_groups(plan, refusals).totals
    assert totals.launches_after == totals.launches_before
    assert totals.bytes_after == totals.bytes_before
    assert totals.predicted_us_after == pytest.approx(totals.predicted_us_before, abs=1e-3)


def test_a_module_that_is_not_canonical_is_cleaned_up():
    b = ModuleBuilder()
    x = b.input("x", (1, 8, 6, 6))
    doubled = b.op("same", relax.op.reshape(x, (1, 8, 6, 6)))
    plan = tf.plan(b.finish(b.relu("relu", b.conv("conv", doubled, 8))), "llvm")
    assert [g.nodes for g in plan.groups] == [("conv", "relu")]


def test_a_symbolic_batch_compiles_ungrouped():
    b = ModuleBuilder()
    x = b.input("x", (tvm.tirx.Var("n", "int64"), 16))
    module = b.finish(b.relu("r2", b.relu("r1", x)))
    compiled = tf.compile(module, "llvm")
    assert not compiled.plan.groups
    assert {u.reason for u in compiled.plan.ungrouped} == {"dynamic_shape"}
    assert compiled(np.ones((3, 16), "float32"))[0].shape == (3, 16)


@pytest.mark.skipif(tvm.cuda(0).exist, reason="this machine has a GPU")
def test_cuda_without_a_gpu_is_a_clear_error():
    with pytest.raises(TargetError):
        tf.compile(residual(), "cuda")


@pytest.mark.parametrize("target", ["llvm", pytest.param("cuda:sm_80", marks=pytest.mark.nvcc)])
def test_the_passes_in_a_users_own_sequential(target):
    """As in the README: our passes among TVM's, then TVM's default pipeline, which must not fuse any further."""
    module, target = residual(), parse_target(target)
    passes = tvm.transform.Sequential(
        [
            tf.transform.Canonicalize(),
            tf.transform.VerticalFusion(max_depth=8),
            tf.transform.HorizontalFusion(max_members=6),
            relax.transform.DeadCodeElimination(),
            tf.transform.LowerGroups(),
            tf.transform.ScheduleGroups(),
        ]
    )
    with target:
        lowered = passes(module)
    assert kernel_calls(lowered) == ["fused_vertical_0", "fused_vertical_1"]
    executable = tvm.compile(lowered, target=target)
    if target.kind.name == "cuda":
        (source,) = device_sources(executable.mod)
        assert set(re.findall(r"(\w+)_kernel\(", source)) == {
            "fused_vertical_0",
            "fused_vertical_1",
        }
        return
    vm = relax.VirtualMachine(executable, tvm.cpu())
    x = data(module)
    got = vm["main"](*[tvm.runtime.tensor(a) for a in x]).numpy()
    assert np.allclose(got, tf.compile(module, "llvm", verify=False)(*x)[0], atol=1e-5)


@pytest.mark.nvcc
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90", "sm_90a"])
def test_the_four_convolutions_are_one_cuda_kernel(arch):
    for options in ({"dtype": "float16"}, {"relu": True, "spatial": 56}):
        compiled = tf.compile(parallel_convs(4, **options), f"cuda:{arch}", verify=False)
        assert len(compiled.cuda_kernels()) == 1


@pytest.mark.nvcc
@pytest.mark.parametrize(
    ("options", "counts"),
    [
        ({"members": 7, "relu": True}, (2, 2)),
        # One wide convolution of six members and one of two, then all sums: narrower tiles of six sums take longer.
        ({"members": 8, "relu": True}, (3, 3)),
        ({"members": 2, "relu": True, "separate": True, "join": None}, (1, 1)),
        ({"members": 2, "relu": True, "separate": True, "join": "concat"}, (1, 1)),
        ({"members": 2, "relu": True, "separate": True}, (1, 1)),
        ({"members": 3, "relu": True, "outputs": [24, 8, 40], "join": None, "kernel": 1}, (1, 1)),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_kernel_counts_of_horizontal_groups(options, counts, dtype):
    layout = "NCHW" if dtype == "float32" else "NHWC"
    module = parallel_convs(channels=16, spatial=20, dtype=dtype, layout=layout, **options)
    count = counts[dtype == "float16"]
    assert len(tf.compile(module, "cuda:sm_90a", verify=False).cuda_kernels()) == count


@pytest.mark.nvcc
def test_plan_build_reads_registers():
    plan = tf.plan(parallel_convs(4, channels=16, spatial=20, relu=True), "cuda:sm_90a", build=True)
    (group,) = plan.groups
    assert group.registers > 0 and group.spill_bytes == 0 and group.shared_bytes is not None


@pytest.mark.nvcc
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(500, 515))
def test_random_graphs_through_nvcc(seed):
    """Every group of a random graph is one kernel of the generated source."""
    module = random_module(seed, operators=16)
    compiled = tf.compile(module, "cuda:sm_80", verify=False, strict=True)
    names = {f"{k}_kernel" for k in compiled.kernels.values()}
    assert names <= set(compiled.cuda_kernels())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(600, 640))
def test_random_graphs_are_right(seed):
    report = tf.verify(random_module(seed, operators=16), "llvm", inputs=1)
    assert report.passed, str(report)


FOREIGN = [
    '{"kind":"llvm","mcpu":"diamondrapids"}',
    '{"kind":"llvm","mtriple":"aarch64-linux-gnu"}',
]


@pytest.mark.parametrize("target", FOREIGN)
def test_code_for_another_cpu_is_checked_on_this_one_and_never_run(target):
    """Running it would end the process by SIGILL."""
    compiled = tf.compile(residual(), target)
    assert len(compiled.plan.groups) == 2
    assert tf.verify(residual(), target, inputs=1).passed
    if not runs_here(parse_target(target)):
        with pytest.raises(TargetError, match="compiled for another CPU"):
            compiled(*data(residual()))


def test_this_cpu_and_older_ones_run_here():
    assert runs_here(parse_target("llvm"))
    host = codegen.llvm_get_system_cpu()
    assert runs_here(parse_target(f'{{"kind":"llvm","mcpu":"{host}"}}'))


def test_an_output_that_is_no_file_is_left_alone(tmp_path):
    compiled = tf.compile(residual(), "llvm", verify=False)
    with pytest.raises(FileExistsError):
        compiled.export(tmp_path)
    with pytest.raises(FileNotFoundError):
        compiled.export(tmp_path / "no" / "model.so")
    assert list(tmp_path.iterdir()) == []


def norm_relu_branches(join):
    """Independent batch norm + ReLU branches, as a model has them: the norm not yet decomposed."""
    b = ModuleBuilder()
    branches = []
    for i in range(3):
        x = b.input(f"x{i}", (1, 8, 15, 15))
        stats = [b.const(8), b.const(8), b.const(8), b.array(np.linspace(0.5, 2, 8))]
        norm = b.op(f"bn{i}", relax.op.nn.batch_norm(x, *stats, axis=1, training=False))
        branches.append(b.relu(f"relu{i}", b.op(f"bn{i}", relax.TupleGetItem(norm, 0))))
    if not join:
        return b.finish(*branches)
    return b.finish(b.add("s2", b.add("s1", branches[0], branches[1]), branches[2]))


@pytest.mark.parametrize(("join", "form"), [(False, "partitioned"), (True, "elementwise")])
def test_norm_and_relu_branches_are_one_launch(join, form):
    module = norm_relu_branches(join)
    plan = tf.plan(module, "cuda:sm_80")
    assert [(g.options["form"], g.members) for g in plan.groups] == [(form, 3)]
    assert plan.totals.launches_after == 1
    assert tf.verify(module, "llvm", inputs=1).passed


@pytest.mark.nvcc
@pytest.mark.parametrize("join", [False, True])
def test_norm_and_relu_branches_are_one_cuda_kernel(join):
    assert len(tf.compile(norm_relu_branches(join), "cuda:sm_80").cuda_kernels()) == 1


def test_a_kernel_that_fails_is_told_from_those_that_do_not(monkeypatch):
    """Each is compiled alone as all are together: warpgroup instructions for the arch that has them."""
    builder = ModuleBuilder("float16")
    x, y = builder.input("x", (2048, 1024)), builder.input("y", (64, 64))
    product = builder.dense("product", x, 2048, bias=False)
    mod = builder.finish(builder.op("root", relax.op.sqrt(y)), product)
    target = parse_target("cuda:sm_90")
    lowered = lower_plan(mod, tf.plan(mod, target), target)
    compiled, real = [], tvm.compile

    def as_nvcc(module, target, **pipelines):
        built = real(module, target=target, **pipelines)
        code, arch = "".join(device_sources(built.mod)), str(target.attrs["arch"])
        compiled.append(("tvmf_wgmma" in code, arch))
        if "sqrt" in code or ("tvmf_wgmma" in code and arch != "sm_90a"):
            raise RuntimeError(f"nvcc rejects it for {arch}")
        return built

    monkeypatch.setattr(tvm, "compile", as_nvcc)
    failed = failing_kernels(lowered.mod, target)
    assert list(failed) == ["tir_sqrt"] and failed["tir_sqrt"].endswith("rejects it for sm_90")
    assert (True, "sm_90a") in compiled


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("Traceback\n  somewhere\nit does not fit\n"), "it does not fit"),
        (KeyError(), "KeyError"),
        (
            RuntimeError("def main():\n  pass\n# Metadata omitted. Use show_meta=True"),
            "RuntimeError",
        ),
    ],
    ids=["a sentence", "nothing", "a script"],
)
def test_what_is_told_of_an_error(error, told):
    assert last_line(error) == told
