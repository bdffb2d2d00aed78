"""Groups of every form, annotated by hand: one kernel each, equal to the unfused operators."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tvm_fusion.build.inputs import make_inputs
from tvm_fusion.build.model import build_module
from tvm_fusion.build.signature import TensorSpec
from tvm_fusion.compat import Target, ir, relax, structural_equal, tvm
from tvm_fusion.errors import LoweringError
from tvm_fusion.testing.modules import ModuleBuilder, as_group, kernel_calls
from tvm_fusion.transform import StripFusion
from tvm_fusion.transform.lower_groups import lower_groups
from tvm_fusion.transform.rewrite_groups import rewrite_group
from tvm_fusion.transform.schedule_groups import schedule_functions
from tvm_fusion.transform.strip_fusion import is_group
from tvm_fusion.verification.reference import Reference
from tvm_fusion.verification.verify import GROUP_TOLERANCE

op = relax.op
PAD = {"form": "collapsed", "join": "add", "balance": "pad"}


class Maps(ModuleBuilder):
    """A builder of small feature maps in either layout."""

    def map(self, name, channels, height=9, width=8):
        shape = (2, channels, height, width)
        return self.input(name, [shape["NCHW".index(axis)] for axis in self.layout])

    def per_channel(self, count):
        return self.const(*[count if axis == "C" else 1 for axis in self.layout])

    def chain(self, name, value, channels, kernel, **options):
        """Convolution, bias and ReLU."""
        value = self.conv(name, value, channels, kernel, **options)
        return self.relu(f"{name}_relu", self.bias(f"{name}_bias", value))

    def biased(self, name, value, channels, kernel, **options):
        return self.bias(f"{name}_bias", self.conv(name, value, channels, kernel, **options))


def repvgg(b):
    x = b.map("x", 6)
    total = b.add("s1", b.biased("c3", x, 6, 3), b.biased("c1", x, 6, 1))
    return b.finish(b.relu("r", b.add("s2", total, x)))


def repvgg_with_scaled_identity(b):
    """The identity has a norm of its own and comes between the convolutions."""
    x = b.map("x", 6)
    scaled = b.op("scale", op.multiply(x, b.per_channel(6)))
    total = b.add("s1", b.biased("c3", x, 6, 3), b.bias("shift", scaled))
    return b.finish(b.relu("r", b.add("s2", b.conv("c1", x, 6, 1), total)))


def dilated_and_flat(b):
    """5×5, a 3×3 on every other tap of it, 1×3 and 3×1."""
    x = b.map("x", 4)
    weights = [(5, 5), (3, 3), (1, 3), (3, 1)]
    options = [
        {"padding": 2}, {"padding": 2, "dilation": 2}, {"padding": (0, 1)}, {"padding": (1, 0)},
    ]  # fmt: skip
    total = None
    for i, (size, extra) in enumerate(zip(weights, options, strict=True)):
        shape = {"O": 5, "I": 4, "H": size[0], "W": size[1]}
        letters = "OIHW" if b.layout == "NCHW" else "OHWI"
        weight = b.const(*[shape[axis] for axis in letters], scale=0.2)
        call = op.nn.conv2d(x, weight, data_layout=b.layout, kernel_layout=letters, **extra)
        value = b.op(f"c{i}", call)
        total = value if total is None else b.add(f"s{i}", total, value)
    return b.finish(total)


def largest_of_unequal_kernels(b):
    x = b.map("x", 6)
    return b.finish(b.op("j", op.maximum(b.chain("c3", x, 5, 3), b.chain("c1", x, 5, 1))))


def concat_of_unequal_kernels(b):
    x = b.map("x", 6)
    parts = [b.biased("c1", x, 4, 1), b.biased("c5", x, 7, 5), b.biased("c3", x, 5, 3)]
    return b.finish(b.relu("r", b.concat("cat", parts)))


def apart_of_unequal_kernels(b):
    x = b.map("x", 6)
    return b.finish(b.chain("c3", x, 5, 3, stride=2), b.chain("c1", x, 7, 1, stride=2))


def projection(b):
    """Other inputs, kernels, strides and reduction lengths; a prologue on one side."""
    x, y = b.map("x", 6), b.map("y", 10, 18, 16)
    scaled = b.op("scale", op.multiply(x, b.per_channel(6)))
    left = b.biased("c3", b.relu("before", scaled), 7, 3)
    return b.finish(b.relu("r", b.add("j", left, b.biased("c1", y, 7, 1, stride=2))))


def mixed_tree(b):
    """(a · b) max (c + outside)."""
    x, y, z = b.map("x", 6), b.map("y", 4), b.map("z", 5)
    product = b.op(
        "m", op.multiply(b.chain("a", x, 5, 3), b.op("g", op.sigmoid(b.conv("b", y, 5, 1))))
    )
    total = b.add("s", b.biased("c", x, 5, 1), z)
    return b.finish(b.bias("t", b.op("j", op.maximum(product, total))))


def chains_joined(b):
    """Each branch is depthwise then pointwise: anchors that depend on each other."""
    x, y = b.map("x", 6), b.map("y", 6)
    sides = []
    for name, source in (("l", x), ("r", y)):
        value = b.chain(f"{name}dw", source, 6, 3, groups=6)
        sides.append(b.biased(f"{name}pw", value, 9, 1))
    return b.finish(b.relu("out", b.add("j", *sides)))


def gated_unit(b):
    """SwiGLU: the gate has an activation that reads it twice, the other branch a bias of its own."""
    x = b.input("x", (2, 5, 12))
    gates = b.dense("gate", x, 9, bias=False)
    active = b.op("silu", op.multiply(gates, b.op("sig", op.sigmoid(gates))))
    return b.finish(b.relu("r", b.op("j", op.multiply(active, b.dense("up", x, 9)))))


def sum_of_products(b):
    """Equal chains: what both run is emitted once, for both."""
    x = b.input("x", (6, 12))
    sides = [b.op(f"act{i}", op.tanh(b.dense(f"fc{i}", x, 7))) for i in range(3)]
    return b.finish(b.add("k", b.add("j", *sides[:2]), sides[2]))


def gate(b):
    """Squeeze and excite: a product for each channel times the map."""
    s, x = b.input("s", (2, 3)), b.map("x", 6)
    weights = b.op("sig", op.sigmoid(b.dense("fc", s, 6)))
    shape = [2 if axis == "N" else 6 if axis == "C" else 1 for axis in b.layout]
    return b.finish(b.op("j", op.multiply(b.op("view", op.reshape(weights, shape)), x)))


def concat_with_identity(b):
    x, y, t = b.map("x", 6), b.map("y", 5), b.map("t", 15)
    parts = [b.chain("c3", x, 4, 3), y, x]
    total = b.add("plus", b.concat("cat", parts), t)
    return b.finish(b.relu("r", b.bias("shift", total)))


def concat_only(b):
    x, y = b.map("x", 6), b.map("y", 5)
    return b.finish(b.concat("cat", [b.chain("c3", x, 4, 3), b.op("g", op.sigmoid(y)), x]))


def slices(b):
    """Split channels, a bottleneck with the shortcut on one half, concat of three with the shortcut."""
    x = b.map("x", 8)
    first, second = b.split("sp", x, 2)
    value = b.chain("c2", b.chain("c1", second, 3, 1), 4, 3)
    parts = [first, second, b.add("res", value, second)]
    return b.finish(b.op("scale", op.multiply(b.concat("cat", parts), b.per_channel(12))))


def shared_prologue(b):
    """Both members read relu(x), which each computes for itself."""
    before = b.relu("before", b.map("x", 6))
    return b.finish(b.concat("cat", [b.chain("c3", before, 4, 3), b.biased("c1", before, 5, 1)]))


def two_results(b):
    """The concatenation is read by what follows and returned."""
    x = b.map("x", 6)
    total = b.concat("cat", [b.chain("c3", x, 4, 3), x])
    return b.finish(total, b.relu("r", total))


def members_of_any_kind(b):
    x, y = b.map("x", 6), b.input("y", (4, 12))
    pooled = b.op("pool", op.nn.max_pool2d(x, 3, padding=1, layout=b.layout))
    return b.finish(b.chain("c3", x, 4, 3), b.layer_norm("ln", b.dense("fc", y, 10)), pooled)


def dense_and_norm(b):
    rows = [b.input(f"x{i}", (5, 12)) for i in range(3)]
    return b.finish(*[b.layer_norm(f"ln{i}", b.dense(f"fc{i}", x, 8)) for i, x in enumerate(rows)])


def projections(b):
    x = b.input("x", (2, 5, 12))
    return b.finish(*[b.dense(f"fc{i}", x, n) for i, n in enumerate((8, 4, 8))])


def norms(b):
    values = []
    for i in range(3):
        scaled = b.op(f"m{i}", op.multiply(b.map(f"x{i}", 5), b.per_channel(5)))
        values.append(b.relu(f"r{i}", b.bias(f"b{i}", scaled)))
    return b.finish(b.add("s2", b.add("s1", values[0], values[1]), values[2]))


def depthwise_then_pointwise(b):
    return b.finish(b.chain("pw", b.chain("dw", b.map("x", 6), 6, 3, groups=6), 9, 1))


def expand_then_depthwise(b):
    return b.finish(b.chain("dw", b.chain("c1", b.map("x", 6), 9, 1), 9, 3, groups=9))


def two_products(b):
    x = b.input("x", (3, 5, 12))
    return b.finish(b.dense("f2", b.op("g", op.nn.gelu(b.dense("f1", x, 8))), 12))


def product_and_norm(b):
    x, y = b.input("x", (5, 12)), b.input("y", (5, 16))
    return b.finish(b.relu("r", b.layer_norm("ln", b.add("res", b.dense("fc", x, 16), y))))


def product_and_softmax(b):
    x, y = b.input("x", (2, 5, 12)), b.input("y", (2, 12, 7))
    return b.finish(b.op("sm", op.nn.softmax(b.op("mm", op.matmul(x, y)))))


def norms_of_one_input(b):
    x = b.input("x", (2, 5, 12))
    return b.finish(
        *[b.relu(f"r{i}", b.layer_norm(f"ln{i}", b.dense(f"fc{i}", x, 8))) for i in range(3)]
    )


def rms_of_one_input(b):
    x = b.input("x", (5, 12))
    values = [b.op(f"fc{i}", relax.op.matmul(x, b.const(12, 8, scale=0.3))) for i in range(2)]
    return b.finish(
        *[
            b.op(f"rms{i}", relax.op.nn.rms_norm(v, b.const(8), axes=[-1]))
            for i, v in enumerate(values)
        ]
    )


def softmax_of_one_input(b):
    x = b.input("x", (5, 12))
    return b.finish(
        *[
            b.op(f"softmax{i}", relax.op.nn.softmax(b.dense(f"fc{i}", x, 8), axis=-1))
            for i in range(2)
        ]
    )


def sums_of_one_input(b):
    x = b.input("x", (5, 12))
    return b.finish(
        *[b.op(f"sum{i}", relax.op.mean(b.dense(f"fc{i}", x, 8), [1])) for i in range(2)]
    )


def of_stored_data(make):
    """A module whose input is a tensor of the model, as the first state of a recurrent network is."""

    def module(b):
        b.input = lambda name, shape: b.const(*shape)
        return make(b)

    return module


# name: module, strategy, options
CASES = {
    "collapsed_repvgg": (repvgg, "cross", {**PAD, "shortcut": "identity"}),
    "collapsed_scaled_identity": (repvgg_with_scaled_identity, "cross", PAD),
    "collapsed_four_kernels": (dilated_and_flat, "cross", PAD),
    "merged_repvgg": (repvgg, "cross", {**PAD, "form": "merged", "shortcut": "identity"}),
    "merged_max": (
        largest_of_unequal_kernels,
        "cross",
        {"form": "merged", "join": "maximum", "balance": "pad"},
    ),
    "merged_concat": (
        concat_of_unequal_kernels,
        "cross",
        {"form": "merged", "join": "concat", "balance": "pad"},
    ),
    "merged_apart": (
        apart_of_unequal_kernels,
        "compound",
        {"form": "merged", "join": "apart", "balance": "pad"},
    ),
    "joined_repvgg": (
        repvgg,
        "cross",
        {"form": "joined", "join": "add", "shortcut": "identity", "balance": "warps"},
    ),
    "joined_projection": (projection, "cross", {"form": "joined", "join": "add"}),
    "joined_tree": (mixed_tree, "cross", {"form": "joined", "join": "mixed"}),
    "joined_chains": (chains_joined, "compound", {"form": "joined", "join": "add"}),
    "joined_gate": (gate, "cross", {"form": "joined", "join": "multiply", "shortcut": "identity"}),
    "concat_identity": (
        concat_with_identity,
        "cross",
        {"form": "partitioned", "join": "concat", "shortcut": "identity"},
    ),
    "concat_only": (concat_only, "cross", {"form": "partitioned", "join": "concat"}),
    "concat_slices": (slices, "cross", {"form": "partitioned", "join": "concat"}),
    "concat_shared_prologue": (
        shared_prologue,
        "compound",
        {"form": "partitioned", "join": "concat"},
    ),
    "concat_two_results": (two_results, "cross", {"form": "partitioned", "join": "concat"}),
    "apart_any": (members_of_any_kind, "compound", {"form": "partitioned", "join": "apart"}),
    "apart_rows": (dense_and_norm, "compound", {"form": "partitioned", "join": "apart"}),
    "merged_dense": (projections, "compound", {"form": "merged", "join": "apart"}),
    "merged_stored": (of_stored_data(projections), "compound", {"form": "merged", "join": "apart"}),
    "merged_stored_norms": (
        of_stored_data(norms_of_one_input),
        "horizontal",
        {"form": "merged", "join": "apart"},
    ),
    "merged_stored_repvgg": (
        of_stored_data(repvgg),
        "cross",
        {**PAD, "form": "merged", "shortcut": "identity"},
    ),
    "merged_gated": (gated_unit, "compound", {"form": "merged", "join": "multiply"}),
    "merged_sum": (sum_of_products, "compound", {"form": "merged", "join": "add"}),
    "merged_norms": (norms_of_one_input, "horizontal", {"form": "merged", "join": "apart"}),
    "merged_rms": (rms_of_one_input, "horizontal", {"form": "merged", "join": "apart"}),
    "merged_softmax": (softmax_of_one_input, "compound", {"form": "merged", "join": "apart"}),
    "merged_sums": (sums_of_one_input, "horizontal", {"form": "merged", "join": "apart"}),
    "elementwise": (norms, "compound", {"form": "elementwise", "join": "add"}),
    "dw_pw": (depthwise_then_pointwise, "vertical", {"form": "back_to_back"}),
    "pw_dw": (expand_then_depthwise, "vertical", {"form": "back_to_back"}),
    "two_products": (two_products, "vertical", {"form": "back_to_back"}),
    "row_norm": (product_and_norm, "vertical", {"form": "anchor_row"}),
    "row_softmax": (product_and_softmax, "vertical", {"form": "anchor_row"}),
}

#: Each type in one layout; float32 in both.
KINDS = [("float32", "NCHW"), ("float32", "NHWC"), ("float16", "NHWC"), ("bfloat16", "NCHW")]


def annotated(name, dtype="float32", layout="NCHW"):
    make, strategy, options = CASES[name]
    module = make(Maps(dtype, layout))
    return module, as_group(module, strategy, **options)


def run(mod, arrays):
    out = relax.VirtualMachine(mod, tvm.cpu())["main"](*map(tvm.runtime.tensor, arrays))
    return [o.numpy() for o in ([out] if hasattr(out, "numpy") else out)]


def check_numbers(module, executables, dtype):
    """Compare each executable with the unfused reference on a position-coded and a random input."""
    specs = [
        TensorSpec(p.name, tuple(int(d) for d in p.ty.shape), str(p.ty.dtype))
        for p in module["main"].params
    ]
    reference = Reference(module, dtype)
    for arrays in make_inputs(specs, 1, seed=5):
        wanted = reference(*arrays)
        for executable in executables:
            for got, value in zip(run(executable, arrays), wanted, strict=True):
                scale = max(np.abs(value).max(), 1e-6)
                error = np.abs(got.astype("float64") - value).max() / scale
                assert error < GROUP_TOLERANCE[dtype]


@pytest.mark.parametrize(("dtype", "layout"), KINDS)
@pytest.mark.parametrize("name", CASES)
def test_one_kernel_with_the_unfused_result(name, dtype, layout):
    module, fused = annotated(name, dtype, layout)
    lowered, kernels = lower_groups(fused)
    assert kernel_calls(lowered) == list(kernels.values()) and len(kernels) == 1
    attrs = lowered[next(iter(kernels.values()))].attrs
    assert dict(attrs["tvm_fusion.options"]) == CASES[name][2]
    scheduled, failures = schedule_functions(lowered, Target("llvm"))
    assert not failures
    built = [build_module(scheduled, Target("llvm"))]
    if (dtype, layout) == KINDS[0]:  # without a schedule too, so that an error has one place
        built.append(tvm.compile(lowered, target="llvm"))
    check_numbers(module, built, dtype)


@pytest.mark.parametrize("name", CASES)
def test_strip_gives_the_module_back(name):
    module, fused = annotated(name)
    assert any(is_group(f) for f in fused.functions.values())
    tvm.ir.assert_structural_equal(StripFusion()(fused), module)


def rewritten(fused):
    """The one group of a module after its rewrite, and the constants of its call."""
    (binding,) = [
        b
        for b in fused["main"].body.blocks[0].bindings
        if isinstance(b.value, relax.Call) and isinstance(b.value.op, ir.GlobalVar)
    ]
    mod, call = rewrite_group(fused, binding.value.op, binding.value)
    mod = relax.transform.Normalize()(mod)
    return mod[call.op.name_hint], [a for a in call.args if not isinstance(a, relax.Var)]


def operators(func):
    return [
        b.value.op.name.rsplit(".", 1)[-1]
        for b in func.body.blocks[0].bindings
        if isinstance(b.value, relax.Call)
    ]


def test_repvgg_becomes_one_convolution():
    _, fused = annotated("collapsed_repvgg")
    func, constants = rewritten(fused)
    assert operators(func) == ["conv2d", "add", "add", "relu"]
    assert [tuple(c.ty.shape) for c in constants] == [(6, 6, 3, 3), (1, 6, 1, 1)]


def test_collapse_before_and_after():
    b = ModuleBuilder()
    x = b.input("x", (1, 1, 4, 4))
    three, one = np.arange(9.0).reshape(1, 1, 3, 3), np.full((1, 1, 1, 1), 100.0)
    left = b.op("c3", op.nn.conv2d(x, b.array(three), padding=1))
    right = b.op("c1", op.nn.conv2d(x, b.array(one)))
    fused = as_group(b.finish(b.relu("r", b.add("s", left, right))), "cross", **PAD)
    func, (weight,) = rewritten(fused)
    three[0, 0, 1, 1] += 100
    np.testing.assert_array_equal(weight.value.numpy(), three)
    builder = relax.BlockBuilder()
    params = [
        relax.Var(name, relax.TensorType(shape, "float32"))
        for name, shape in (("x", (1, 1, 4, 4)), ("w", (1, 1, 3, 3)))
    ]
    with builder.function("after", params, attrs=dict(func.attrs.items()), private=True):
        with builder.dataflow():
            value = builder.emit(op.nn.relu(builder.emit(op.nn.conv2d(*params, padding=1))))
            out = builder.emit_output(value)
        builder.emit_func_output(out)
    tvm.ir.assert_structural_equal(func, builder.get()["after"])


@pytest.mark.parametrize("name", ["joined_projection", "joined_chains", "elementwise", "dw_pw"])
def test_bodies_that_need_no_rewrite_stay(name):
    _, fused = annotated(name)
    (before,) = [f for f in fused.functions.values() if is_group(f)]
    assert structural_equal(rewritten(fused)[0], before)


def test_narrow_joins_are_float32_and_prologues_are_not():
    _, fused = annotated("joined_projection", "float16")
    func, _ = rewritten(fused)
    types = {
        b.value.op.name.rsplit(".", 1)[-1]: str(b.var.ty.dtype)
        for b in func.body.blocks[0].bindings
        if isinstance(b.value, relax.Call) and b.value.op.name != "relax.astype"
    }
    assert types == {
        "multiply": "float16",
        "conv2d": "float16",
        "add": "float32",
        "relu": "float32",
    }
    assert operators(func).count("astype") == 3  # the results of both anchors, and of the group


def test_padding_leaves_equal_kernels_alone():
    b = Maps()
    x = b.map("x", 6)
    fused = as_group(b.finish(b.add("s", b.conv("a", x, 6), b.conv("b", x, 6))), "cross", **PAD)
    _, (weight,) = rewritten(fused)
    assert tuple(weight.ty.shape) == (6, 6, 3, 3)


def test_only_the_parts_that_are_read_are_sliced():
    b = Maps()
    parts = b.split("sp", b.map("x", 9), 3)
    out = b.concat("cat", [b.chain("c1", parts[0], 4, 1), parts[2]])
    fused = as_group(b.finish(out), "cross", form="partitioned", join="concat")
    assert operators(rewritten(fused)[0]).count("strided_slice") == 2


def test_a_concatenation_keeps_every_element_in_place():
    """Distinct values, no arithmetic: what is copied must be equal, not close."""
    b = ModuleBuilder()
    x, y = b.input("x", (1, 4, 2, 3)), b.input("y", (1, 2, 2, 3))
    first, second = b.split("sp", x, [1])
    out = b.concat("cat", [second, y, b.op("neg", op.negative(first)), y])
    module = b.finish(out)
    lowered, _ = lower_groups(as_group(module, "cross", form="partitioned", join="concat"))
    a, c = np.arange(24.0).reshape(1, 4, 2, 3), np.arange(12.0).reshape(1, 2, 2, 3) + 100
    (got,) = run(tvm.compile(lowered, target="llvm"), [a.astype("float32"), c.astype("float32")])
    np.testing.assert_array_equal(got, np.concatenate([a[:, 1:], c, -a[:, :1], c], 1))


def random_concatenation(seed, b):
    """Random operands along a random axis, and a tail whose operands broadcast in every way."""
    rnd = random.Random(seed)
    axis = rnd.choice([1, 2, 3])
    shape = [2, 6, 4, 5]
    x, y = b.input("x", shape), b.input("y", shape)
    parts, size = [], 0
    for i in range(rnd.randint(2, 4)):
        source = rnd.choice([x, y])
        kind = rnd.choice(["outside", "slice", "conv", "unary", "chain"])
        if kind == "slice":
            source = rnd.choice(b.split(f"sp{i}", source, 2 if axis != 3 else [2], axis))
        elif kind == "conv":
            source = b.relu(f"r{i}", b.conv(f"c{i}", source, 6, rnd.choice([1, 3])))
        elif kind != "outside":
            source = b.op(f"u{i}", op.sigmoid(source))
            source = b.op(f"v{i}", op.multiply(source, x)) if kind == "chain" else source
        parts.append(source)
        size += int(source.ty.shape[axis])
    value = b.concat("cat", parts, axis)
    whole = [int(extent) for extent in value.ty.shape]
    for i in range(rnd.randint(0, 4)):
        kept = [extent if rnd.random() < 0.6 else 1 for extent in whole]
        kept = kept[rnd.choice([0, 0, 1, 2]) :]
        operand = b.const(*kept) if rnd.random() < 0.5 else b.input(f"o{i}", kept)
        operands = [value, operand] if rnd.random() < 0.5 else [operand, value]
        name = rnd.choice(["add", "subtract", "multiply", "maximum"])
        value = b.op(f"t{i}", getattr(op, name)(*operands))
        if rnd.random() < 0.3:
            value = b.relu(f"tr{i}", value)
    return b.finish(value)


@pytest.mark.parametrize("seed", range(24))
def test_random_concatenations(seed):
    dtype = ("float32", "float16")[seed % 2]
    module = random_concatenation(seed, Maps(dtype))
    lowered, kernels = lower_groups(as_group(module, "cross", form="partitioned", join="concat"))
    assert kernel_calls(lowered) == list(kernels.values()) and len(kernels) == 1
    check_numbers(module, [tvm.compile(lowered, target="llvm")], dtype)


def unpaddable(b):
    """A 3×3 without padding does not reach the position that the padded 1×1 reads."""
    x = b.map("x", 6, 8, 8)
    y = b.conv("c1", x, 6, 1, stride=5, padding=1)
    return b.finish(b.add("s", b.conv("c3", x, 6, 3, stride=5, padding=0), y))


def other_inputs(b):
    x, y = b.map("x", 6), b.map("y", 6)
    return b.finish(b.add("s", b.conv("c3", x, 6, 3), b.conv("c1", y, 6, 1)))


def not_linear(b):
    x = b.map("x", 6)
    return b.finish(b.add("s", b.chain("c3", x, 6, 3), b.conv("c1", x, 6, 1)))


def read_twice(b):
    x = b.map("x", 6)
    left = b.conv("c3", x, 6, 3)
    return b.finish(b.add("s", left, b.conv("c1", x, 6, 1)), left)


def concat_then_softmax(b):
    x = b.map("x", 6)
    total = b.concat("cat", [b.chain("c3", x, 4, 3), x])
    return b.finish(b.op("sm", op.nn.softmax(total, axis=b.layout.index("C"))))


def concat_and_more(b):
    x = b.map("x", 6)
    left = b.chain("c3", x, 4, 3)
    return b.finish(b.concat("cat", [left, x]), left)


def member_read_after_the_join(b):
    x = b.map("x", 6)
    left = b.chain("c3", x, 1, 3)
    return b.finish(b.add("s", b.concat("cat", [left, x]), left))


def one_member(b):
    return b.finish(b.chain("c3", b.map("x", 6), 4, 3))


def grouped(b):
    x = b.map("x", 6)
    return b.finish(b.chain("a", x, 6, 3, groups=2), b.chain("b", x, 6, 3, groups=2))


def rows_of_two_kinds(b):
    x = b.input("x", (5, 12))
    norm, other = b.layer_norm("ln", b.dense("fc0", x, 8)), b.dense("fc1", x, 8)
    return b.finish(norm, b.op("softmax", relax.op.nn.softmax(other, axis=-1)))


def channels_that_differ(b):
    x = b.map("x", 6)
    joined = b.add("s", b.conv("c3", x, 6, 3), b.conv("c1", x, 1, 1))
    return b.finish(joined)


# module, options, words of the message
MISFITS = {
    "padding": (unpaddable, PAD, "a tap would fall beside"),
    "no_balance": (repvgg, {"form": "collapsed", "join": "add"}, "differ in their attributes"),
    "inputs": (other_inputs, PAD, "read different tensors"),
    "not_linear": (not_linear, PAD, "not linear"),
    "read_twice": (read_twice, PAD, "read outside the sum"),
    "weights": (channels_that_differ, PAD, "differ in shape"),
    "no_sum": (apart_of_unequal_kernels, PAD, "no sum takes all branches"),
    "merged_identity": (
        concat_with_identity,
        {"form": "merged", "join": "concat", "balance": "pad"},
        "no weights to merge|no anchors of one type",
    ),
    "merged_structure": (
        not_linear,
        {"form": "merged", "join": "apart", "balance": "pad"},
        None,
    ),
    "merged_groups": (grouped, {"form": "merged", "join": "apart"}, "grouped convolutions"),
    "merged_rows": (rows_of_two_kinds, {"form": "merged", "join": "apart"}, "different operators"),
    "merged_inputs": (dense_and_norm, {"form": "merged", "join": "apart"}, "different tensors"),
    "softmax": (concat_then_softmax, {"form": "partitioned", "join": "concat"}, "mixes elements"),
    "more": (concat_and_more, {"form": "partitioned", "join": "concat"}, "not all results"),
    "after": (
        member_read_after_the_join,
        {"form": "partitioned", "join": "concat"},
        "of a member",
    ),
    "alone": (one_member, {"form": "partitioned", "join": "apart"}, "no independent members"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_what_does_not_fit_is_refused(name):
    make, options, words = MISFITS[name]
    fused = as_group(make(Maps()), "cross", **options)
    if words is None:  # joined element by element, members may differ
        assert len(lower_groups(fused)[1]) == 1
        return
    with pytest.raises(LoweringError, match=words):
        lower_groups(fused)
