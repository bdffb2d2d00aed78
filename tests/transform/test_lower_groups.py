"""Lowering: one PrimFunc per group, with its attributes and the unfused result."""

from __future__ import annotations

import numpy as np
import pytest

from tvm_fusion.compat import relax, tirx, tvm
from tvm_fusion.config import FusionConfig
from tvm_fusion.testing.modules import ModuleBuilder, as_group, parallel_convs, random_module
from tvm_fusion.transform import Fuse, LowerGroups
from tvm_fusion.transform.lower_groups import lower_groups
from tvm_fusion.verification.reference import Reference


def run(mod, arrays):
    vm = relax.VirtualMachine(tvm.compile(mod, target="llvm"), tvm.cpu())
    out = vm["main"](*[tvm.runtime.tensor(a) for a in arrays])
    return [o.numpy() for o in ([out] if hasattr(out, "numpy") else out)]


def check(module, dtype="float32", tolerance=1e-5, **options):
    """Lower with every strategy, run unscheduled on llvm, compare with the unfused reference; return the PrimFuncs."""
    fused = Fuse(FusionConfig(**options), target="cuda:sm_90")(module)
    return compare(module, fused, dtype, tolerance)


def compare(module, fused, dtype, tolerance):
    """Lower an annotated module and compare it with the unfused reference of the module that it was made from."""
    lowered = LowerGroups()(fused)
    rng = np.random.default_rng(7)
    shapes = [[int(d) for d in p.ty.shape] for p in module["main"].params]
    arrays = [rng.standard_normal(s).astype(dtype) for s in shapes]
    for got, wanted in zip(run(lowered, arrays), Reference(module, dtype)(*arrays), strict=True):
        scale = max(np.abs(wanted).max(), 1e-6)
        assert np.abs(got.astype("float64") - wanted).max() / scale < tolerance
    return {gv.name_hint: f for gv, f in lowered.functions.items() if isinstance(f, tirx.PrimFunc)}


#: Without compounds, whose groups are the same with another name.
SIMPLE = {"strategies": "vertical,horizontal"}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize(
    ("form", "options"),
    [
        ("collapsed", {"members": 4}),
        ("merged", {"members": 4, "relu": True}),
        ("merged", {"members": 3, "relu": True, "join": "maximum"}),
        ("merged", {"members": 3, "relu": True, "join": "concat", "outputs": [4, 6, 2]}),
        ("merged", {"members": 3, "relu": True, "join": None, "outputs": [4, 6, 2]}),
        ("partitioned", {"members": 2, "relu": True, "join": "concat", "separate": True}),
        ("partitioned", {"members": 2, "relu": True, "join": None, "separate": True}),
        ("joined", {"members": 3, "relu": True, "separate": True}),
    ],
)
def test_horizontal_forms(form, options, layout, dtype):
    module = parallel_convs(channels=8, spatial=7, dtype=dtype, layout=layout, **options)
    join = options.get("join", "add") or "apart"
    fused = as_group(module, "horizontal", form=form, join=join)
    functions = compare(module, fused, dtype, 1e-5 if dtype == "float32" else 4e-3)
    assert list(functions) == ["fused_horizontal_0"]
    assert functions["fused_horizontal_0"].attrs["tvm_fusion.members"] == options["members"]


@pytest.mark.parametrize("members", [7, 8])
def test_split_sums(members):
    functions = check(parallel_convs(members, channels=4, spatial=7, relu=True))
    assert len(functions) == 2


def branches_of_a_large_sum(kind):
    """1000 + 0.3 + … + 0.3 and then -1000: float16 rounds each partial sum to a multiple of 0.5."""
    b = ModuleBuilder("float16")
    x = b.input("x", (1, 1, 4, 4))
    terms = []
    for i, value in enumerate([1000.0, 0.3, 0.3, 0.3, 0.3, -1000.0]):
        source = x if kind == "merged" else b.input(f"x{i}", (1, 1, 4, 4))
        if kind == "elementwise":
            term = b.op(f"m{i}", relax.op.multiply(source, b.array(np.full((1, 1, 1, 1), value))))
        else:
            weight = b.array(np.full((1, 1, 1, 1), value))
            term = b.op(f"c{i}", relax.op.nn.conv2d(source, weight))
        terms.append(b.op(f"t{i}", relax.op.clip(term, -2000, 2000)))
    total = terms[0]
    for i, term in enumerate(terms[1:]):
        total = b.add(f"s{i}", total, term)
    return b.finish(total), 1 if kind == "merged" else 7


@pytest.mark.parametrize("kind", ["merged", "joined", "elementwise"])
def test_float16_sums_of_branches_accumulate_in_float32(kind):
    module, inputs = branches_of_a_large_sum(kind)
    fused = Fuse(target="cuda:sm_90")(module)
    (group,) = [f for f in fused.functions.values() if "tvm_fusion.strategy" in (f.attrs or {})]
    assert group.attrs["tvm_fusion.options"]["form"] == kind
    ones = [np.ones((1, 1, 4, 4), "float16")] * inputs
    (got,) = run(LowerGroups()(fused), ones)
    assert np.allclose(got.astype("float32"), 1.2, atol=2e-3)


def test_merged_dense_layers():
    b = ModuleBuilder()
    x = b.input("x", (5, 12))
    heads = [b.op(f"fc{i}", relax.op.matmul(x, b.const(12, n))) for i, n in enumerate((4, 7, 3))]
    heads = [
        b.op(f"bias{i}", relax.op.add(h, b.const(int(h.ty.shape[1])))) for i, h in enumerate(heads)
    ]
    functions = check(b.finish(*heads), **SIMPLE)
    assert list(functions) == ["fused_horizontal_0"]


def test_summed_dense_layers_collapse():
    b = ModuleBuilder()
    x = b.input("x", (5, 12))
    first, second = (b.op(f"fc{i}", relax.op.matmul(x, b.const(12, 8))) for i in range(2))
    module = b.finish(b.relu("r", b.add("sum", first, second)))
    assert list(check(module, **SIMPLE)) == ["fused_horizontal_0"]


def test_collapse_adds_biases_too():
    b = ModuleBuilder()
    x = b.input("x", (1, 8, 6, 6))
    branches = [b.bias(f"b{i}", b.conv(f"c{i}", x, 8)) for i in range(3)]
    total = b.add("s2", b.add("s1", branches[0], branches[1]), branches[2])
    module = b.finish(b.relu("r", total))
    assert list(check(module, **SIMPLE)) == ["fused_horizontal_0"]


def test_equal_groups_share_one_kernel():
    b = ModuleBuilder()
    value = b.input("x", (1, 8, 6, 6))
    for i in range(3):
        value = b.relu(f"r{i}", b.bias(f"b{i}", b.conv(f"c{i}", value, 8)))
    lowered, kernels = lower_groups(Fuse(target="cuda:sm_90")(b.finish(value)))
    assert len(kernels) == 3 and len(set(kernels.values())) == 1
    assert sum(isinstance(f, tirx.PrimFunc) for f in lowered.functions.values()) == 1


@pytest.mark.parametrize("seed", range(12))
def test_random_graphs(seed):
    check(random_module(seed, operators=14))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 300))
def test_many_random_graphs(seed):
    check(random_module(seed, operators=20))


def test_a_scalar_constant_in_where():
    b = ModuleBuilder()
    x = b.input("x", (3, 4))
    keep = b.op("gt", relax.op.greater(x, relax.const(0.5, "float32")))
    y = b.op("where", relax.op.where(keep, x, relax.const(-2.0, "float32")))
    assert list(check(b.finish(b.relu("r", b.op("neg", relax.op.negative(y)))))) == [
        "fused_vertical_0"
    ]
