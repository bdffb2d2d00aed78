"""Indices mean the same before and after buffers are flattened, whatever TVM's own pass makes of them."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm_fusion.schedules import schedule
from tvm_fusion.schedules.analysis import nodes_of
from tvm_fusion.schedules.cuda.elementwise import Elementwise
from tvm_fusion.schedules.flatten_exactly import flatten_exactly, passes_before_flattening
from tvm_fusion.schedules.index_forms import IndexForms, accesses
from tvm_fusion.schedules.integer_values import values_of

from tvm_fusion.build import tir_pipeline
from tvm_fusion.build.cuda_source import cuda_source
from tvm_fusion.compat import ir, relax, te, tirx, tvm
from tvm_fusion.targets import parse_target
from tvm_fusion.testing import cuda_emulation
from tvm_fusion.testing.groups import group_function, group_module

op = relax.op
CUDA = parse_target("cuda:sm_90")


def gather(shape, index, dtype="float32"):
    """Element ``index(i, j, …)`` of a vector, for all indices of a shape; index is from 0."""
    variables = [tirx.Var(f"i{n}", "int32") for n in range(len(shape))]
    highest = int(np.max(places(shape, index(*variables), variables)))
    source = te.placeholder((highest + 1,), dtype, "source")
    made = te.compute(shape, lambda *i: source[index(*i)], "made")
    return te.create_prim_func([source, made])


def places(shape, index, variables):
    grid = dict(zip(variables, np.ogrid[tuple(map(slice, shape))], strict=True))
    return np.broadcast_to(values_of(index, grid), shape)


def lowered_flat(func):
    """A function with flattened buffers, as the pipeline of this package makes it."""
    exact = flatten_exactly(func)
    return stock_flat(func) if exact is func else exact


def flat_places(func, shape):
    """What the only load of a lowered function loads, for all values of its loops."""
    (load,) = (a for a in accesses(func.body) if isinstance(a, ir.TensorLoad))
    loops = {loop.loop_var.name: loop.loop_var for loop in nodes_of(func.body, tirx.For)}
    # A loop of one turn is gone.
    order = [loops.get(f"i{n}", tirx.Var("gone", "int32")) for n in range(len(shape))]
    return places(shape, load.indices[0], order)


def stock_flat(func):
    passes = [*passes_before_flattening(), tirx.transform.FlattenBuffer()]
    return tvm.transform.Sequential(passes)(tvm.IRModule({"main": func}))["main"]


div, mod = tirx.floordiv, tirx.floormod

#: Loops, index, and whether TVM 0.27 flattens it wrongly.
FORMS = {
    "two rolls": ((5,), lambda i: mod(mod(i + 1, 5) + 3, 5), True),
    "three rolls": ((12,), lambda i: mod(mod(mod(i + 1, 12) + 5, 12) + 2, 12), True),
    "remainder, then quotient": ((8,), lambda i: div(mod(i + 3, 6) + 4, 3), True),
    "quotient, and a remainder": (
        (12,),
        lambda i: mod(div(i + 5, 4), 2) * 4 + mod(i + 6, 4),
        True,
    ),
    "quotient of a roll": ((20,), lambda i: div(mod(i + 1, 20) + 3, 5), True),
    "side by side": ((4,), lambda i: mod(i, 3) * 3 + mod(i + 1, 3), True),
    "runs down": ((6,), lambda i: mod(14 - i, 6), True),
    "runs down, quotient": ((6,), lambda i: div(11 - i, 4), True),
    "of two loops": ((3, 4), lambda i, j: mod(mod(i * 4 + j + 1, 12) + 3, 12), True),
    "in one of two axes": ((4, 5), lambda i, j: i * 5 + mod(mod(j + 1, 5) + 3, 5), True),
    "made one before": ((8,), lambda i: div(div(i + 5, 6) + 3, 2), False),
    "one roll": ((5,), lambda i: mod(i + 1, 5), False),
    "padded": ((5,), lambda i: div(i + 3, 4), False),
    "no offset": ((24,), lambda i: mod(div(i, 4), 3) * 4 + mod(i, 4), False),
    "reshaped": ((6, 10), lambda i, j: div(i * 10 + j, 12) * 12 + mod(i * 10 + j, 12), False),
    "in quotient and remainder": ((3, 8), lambda i, j: div(j + 2, 2) * 3 + i, False),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms(name):
    shape, index, is_lost = FORMS[name]
    func = gather(shape, index)
    loops = [tirx.Var(f"i{n}", "int32") for n in range(len(shape))]
    expected = places(shape, index(*loops), loops)
    np.testing.assert_array_equal(flat_places(lowered_flat(func), shape), expected)
    # What TVM does: were it right, this module could go.
    assert (flatten_exactly(func) is not func) == is_lost
    assert np.array_equal(flat_places(stock_flat(func), shape), expected) == (not is_lost)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("dtype", ["float32", "bool"])
def test_values_on_the_cpu(name, dtype):
    shape, index, _ = FORMS[name]
    func = gather(shape, index, dtype)
    loops = [tirx.Var(f"i{n}", "int32") for n in range(len(shape))]
    expected = places(shape, index(*loops), loops)
    values = np.arange(expected.max() + 1)
    values = values.astype("float32") if dtype == "float32" else values % 3 == 1
    kernel = tvm.compile(
        tvm.IRModule({"main": func}), target="llvm", tir_pipeline=tir_pipeline.NAME
    )
    made = tvm.runtime.tensor(np.zeros(shape, dtype))
    kernel["main"](tvm.runtime.tensor(values), made)
    np.testing.assert_array_equal(made.numpy(), values[expected])


def steps(draw, extents):
    """An index from 0 of some loops: sums, quotients and remainders, offsets, in any order."""

    def number(least, most):
        return draw(st.integers(least, most))

    chosen = [n for n in range(len(extents)) if n == 0 or draw(st.booleans())]

    def index(loops):
        made = tirx.const(0, "int32")
        for n in chosen:
            made = made * extents[n] + loops[n]
        for kind, value, offset, down in plan:
            made = made + offset if not down else tirx.const(400 + offset, "int32") - made
            made = div(made, value) if kind else mod(made, value)
        return made * scale + rest(loops)

    plan = [(draw(st.booleans()), number(2, 12), number(0, 9), number(0, 5) == 0)
            for _ in range(number(1, 3))]  # fmt: skip
    scale, beside, offset = number(1, 5), number(2, 9), number(0, 9)
    rest = [lambda loops: 0, lambda loops: mod(loops[0] + offset, beside)][draw(st.booleans())]
    return index


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_any_index(data):
    """Offsets are kept; what is not suspected TVM gets right."""
    extents = data.draw(
        st.lists(st.sampled_from([1, 2, 3, 4, 5, 6, 8, 12]), min_size=1, max_size=3)
    )
    index = steps(data.draw, extents)
    loops = [tirx.Var(f"i{n}", "int32") for n in range(len(extents))]
    expected = places(extents, index(loops), loops)
    func = gather(extents, lambda *i: index(i))
    np.testing.assert_array_equal(flat_places(lowered_flat(func), extents), expected)
    if not IndexForms(func).has_suspects():
        np.testing.assert_array_equal(flat_places(stock_flat(func), extents), expected)


# What operators become of it.


def tile(emit, x, axis, times=2):
    repeats = [1] * len(x.ty.shape)
    repeats[axis] = times
    return emit(op.tile(x, repeats))


def cut(emit, x, axis, begin, end):
    return emit(op.strided_slice(x, axes=[axis], begin=[begin], end=[end], strides=[1]))


def rolled(emit, x, axis, by):
    size = int(x.ty.shape[axis])
    return cut(emit, tile(emit, x, axis), axis, by, by + size)


def two_rolls(emit, x):
    return emit(op.nn.relu(rolled(emit, rolled(emit, x, 0, 3), 0, 2)))


def two_rolls_numpy(x):
    return np.maximum(np.roll(x, -5, 0), 0)


def flipped(emit, x):
    x = tile(emit, emit(op.permute_dims(x)), 0)
    return emit(op.nn.relu(emit(op.flip(emit(op.repeat(x, 6, 1)), 0))))


def flipped_numpy(x):
    return np.maximum(np.flip(np.repeat(np.tile(x.T, (2, 1)), 6, 1), 0), 0)


def windows(emit, x):
    """Shifted windows: rolled twice, divided into windows, transposed."""
    x = rolled(emit, rolled(emit, x, 0, 4), 0, 6)
    parts = emit(op.permute_dims(emit(op.reshape(x, (2, 7, 3, 4))), (0, 2, 1, 3)))
    return emit(op.nn.relu(emit(op.reshape(parts, (6, 28)))))


def windows_numpy(x):
    x = np.roll(x, -10, 0)
    return np.maximum(x.reshape(2, 7, 3, 4).transpose(0, 2, 1, 3).reshape(6, 28), 0)


CHAINS = {
    "two rolls": (two_rolls, two_rolls_numpy, True),
    "flipped": (flipped, flipped_numpy, True),
    "windows": (windows, windows_numpy, False),
}


def chain(name, target, shape=(14, 12)):
    make, expected, is_lost = CHAINS[name]
    func = group_function(group_module((shape,), "float32", lambda b, x: make(b.emit, x)))
    x = (np.arange(1, 1 + np.prod(shape)).reshape(shape)).astype("float32")
    return schedule(func, target)[0], x, expected(x), is_lost


def on_cpu(func, inputs, shape):
    named = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    made = tvm.runtime.tensor(np.zeros(shape, "float32"))
    kernel = tvm.compile(named, target="llvm", tir_pipeline=tir_pipeline.NAME)["main"]
    kernel(*map(tvm.runtime.tensor, inputs), made)
    return made.numpy()


@pytest.mark.parametrize("name", CHAINS)
def test_chains_on_the_cpu(name):
    func, x, expected, _ = chain(name, parse_target("llvm"))
    np.testing.assert_array_equal(on_cpu(func, [x], expected.shape), expected)


@pytest.mark.parametrize("name", CHAINS)
def test_chains_in_cuda(name, monkeypatch):
    func, x, expected, is_lost = chain(name, CUDA)
    np.testing.assert_array_equal(cuda_emulation.run(func, [x], CUDA)[0], expected)
    monkeypatch.setattr(tir_pipeline, "flatten_exactly", lambda func, **_: func)
    stock = cuda_emulation.run(func, [x], CUDA)[0]
    assert np.array_equal(stock, expected) == (not is_lost)


def test_members_of_one_kernel():
    """Members are lowered each by itself before they are merged."""

    def make(builder, x, y):
        return [flipped(builder.emit, x), flipped(builder.emit, y)]

    func = group_function(group_module(((14, 12), (16, 12)), "float32", make))
    scheduled, template = schedule(func, CUDA)
    assert template == "partitioned"
    x, y = (np.arange(1, 1 + n * 12).reshape(n, 12).astype("float32") for n in (14, 16))
    for made, source in zip(cuda_emulation.run(scheduled, [x, y], CUDA), (x, y), strict=True):
        np.testing.assert_array_equal(made, flipped_numpy(source))


@pytest.mark.parametrize("other", ["right", "first_kernel"])
def test_beside_functions_that_tvm_gets_right(other):
    """Also where kernels and functions have one name, so that they cannot be lowered apart."""
    wrong = chain("two rolls", CUDA)[0]
    right = group_function(group_module(((14, 12),), "float32", lambda b, x: b.emit(op.nn.relu(x))))
    named = {"first": wrong, other: schedule(right, CUDA)[0]}
    functions = {name: f.with_attr("global_symbol", name) for name, f in named.items()}
    source = cuda_source(tvm.IRModule(functions), CUDA)
    alone = cuda_emulation.cuda_source(wrong, CUDA)
    (index,) = set(re.findall(r"x0_ptr\[(.*)\]", alone))
    assert index in source


def test_a_right_function_is_left_alone():
    """So what is generated for it stays what it was."""

    def make(emit, x, w):
        return emit(op.nn.relu(emit(op.nn.conv2d(x, w, padding=1))))

    for target in (CUDA, parse_target("llvm")):
        for shapes in (((1, 8, 14, 14), (16, 8, 3, 3)), ((1, 16, 7, 9), (16, 16, 1, 1))):
            func = group_function(
                group_module(shapes, "float32", lambda b, x, w: make(b.emit, x, w))
            )
            scheduled = schedule(func, target)[0]
            assert flatten_exactly(scheduled) is scheduled
            flat = flatten_exactly(scheduled, always=True)
            assert flatten_exactly(flat, always=True) is flat


def test_blocks_whose_layout_a_template_would_change():
    """``transform_block_layout`` loses offsets as well: a gate that is rolled twice goes to another template."""

    def make(emit, x, w):
        return two_rolls(emit, emit(op.matmul(x, w)))

    x, w = (
        np.random.default_rng(0).standard_normal(s).astype("float32") for s in ((14, 12), (12, 16))
    )
    for target in (CUDA, parse_target("llvm")):
        func = group_function(
            group_module((x.shape, w.shape), "float32", lambda b, *i: make(b.emit, *i))
        )
        made = schedule(func, target)[0]
        if target.kind.name == "cuda":
            found = cuda_emulation.run(made, [x, w], target)[0]
        else:
            found = on_cpu(made, [x, w], (14, 16))
        np.testing.assert_allclose(found, two_rolls_numpy(x @ w), rtol=1e-5, atol=1e-5)


def test_a_gate_without_such_indices_is_still_one():
    def make(emit, x, w):
        return emit(op.nn.relu(rolled(emit, emit(op.matmul(x, w)), 0, 3)))

    func = group_function(
        group_module(((14, 12), (12, 16)), "float32", lambda b, x, w: make(b.emit, x, w))
    )
    assert schedule(func, CUDA)[1] == "gated"


@pytest.mark.parametrize(("rolls", "is_wide"), [(1, True), (2, False)])
def test_vectors_of_large_outputs(rolls, is_wide):
    """They need another layout of the block, which only simple indices survive."""
    shapes = ((1 << 18,), (1 << 17,))
    by = (3, 2)[:rolls]

    def make(builder, x, y):
        for shift in by:
            x = rolled(builder.emit, x, 0, shift)
        return [builder.emit(op.nn.relu(x)), builder.emit(op.nn.relu(y))]

    func = group_function(group_module(shapes, "float32", make))
    made = Elementwise().apply(func, CUDA).mod["main"]
    kinds = [int(loop.kind) for loop in nodes_of(made.body, tirx.For)]
    assert (int(tirx.ForKind.VECTORIZED) in kinds) == is_wide
    x, y = (np.random.default_rng(1).standard_normal(s).astype("float32") for s in shapes)
    found = cuda_emulation.run(made, [x, y], CUDA, check_races=False)
    np.testing.assert_array_equal(found[0], np.maximum(np.roll(x, -sum(by), 0), 0))
    np.testing.assert_array_equal(found[1], np.maximum(y, 0))
