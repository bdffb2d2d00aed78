"""Small graphs that put one rule of fusion to the test each: ratios, mixed shapes, long chains.

As in ``blocks``: one binding per operator, sizes as arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..compat import relax, tvm
from .modules import ModuleBuilder


def relaxation_chain(
    *, depth: int = 8, rows: int = 4096, width: int = 4096, dtype: str = "float16", seed: int = 0
) -> tvm.IRModule:
    """A chain ``z ← exp(x - 0.5 z)`` on a narrow tensor, ``depth`` times, then ``b + z``.

    ``x [rows, 1]``, ``b [rows, width]`` → ``[rows, width]``; three operators a step. Pulled over the
    broadcast, the chain would be computed ``width`` times.
    """
    b = ModuleBuilder(dtype, seed=seed)
    x, wide = b.input("x", (rows, 1)), b.input("b", (rows, width))
    half, z = b.array(np.array(0.5)), x
    for i in range(depth):
        z = b.op(f"half{i}", relax.op.multiply(z, half))
        z = b.op(f"exp{i}", relax.op.exp(b.op(f"sub{i}", relax.op.subtract(x, z))))
    return b.finish(b.add("sum", wide, z))


def mixed_convs(
    outputs: Sequence[int],
    *,
    channels: int = 32,
    size: int | Sequence[int] = 14,
    stride: int | Sequence[int] = 1,
    kernel: int | Sequence[int] = 3,
    relu: bool = True,
    dtype: str = "float32",
    layout: str = "NCHW",
    seed: int = 0,
) -> tvm.IRModule:
    """Parallel convolutions, returned apart, whose members need not agree.

    One input ``[1, channels, size, size]`` when ``size`` is a number, else one per member.
    Member i has ``outputs[i]`` channels and the i-th ``stride`` and ``kernel`` ("same" padding).
    """
    b = ModuleBuilder(dtype, layout, seed)
    count = len(outputs)
    shared = isinstance(size, int)
    sizes, strides, kernels = (
        [v] * count if isinstance(v, int) else list(v) for v in (size, stride, kernel)
    )
    inputs: list[Any] = []
    for i in range(1 if shared else count):
        shape = {"N": 1, "C": channels, "H": sizes[i], "W": sizes[i]}
        inputs.append(b.input(f"x{i}", [shape[axis] for axis in layout]))
    results = []
    for i in range(count):
        x = inputs[0 if shared else i]
        y = b.conv(f"conv{i}", x, outputs[i], kernels[i], stride=strides[i])
        results.append(b.relu(f"relu{i}", y) if relu else y)
    return b.finish(*results)


def conv3d_branches(
    *,
    kernels: Sequence[int] = (3, 3),
    channels: int = 16,
    outputs: int = 16,
    size: int = 8,
    join: bool = True,
    dtype: str = "float32",
    seed: int = 0,
) -> tvm.IRModule:
    """Branches of two 3-D convolutions each, 1×1×1 and then k×k×k with ReLU, summed or apart.

    ``[1, channels, size, size, size]`` → ``[1, outputs, size, size, size]``; one branch per entry of
    ``kernels``.
    """
    b = ModuleBuilder(dtype, seed=seed)
    x = b.input("x", (1, channels, size, size, size))

    def conv(name: str, value: Any, inner: int, kernel: int) -> Any:
        scale = (inner * kernel**3) ** -0.5
        weight = b.const(outputs, inner, kernel, kernel, kernel, scale=scale)
        return b.op(name, relax.op.nn.conv3d(value, weight, padding=kernel // 2))

    branches = []
    for i, kernel in enumerate(kernels):
        y = conv(f"large{i}", conv(f"small{i}", x, channels, 1), outputs, kernel)
        branches.append(b.relu(f"relu{i}", y))
    if not join:
        return b.finish(*branches)
    total = branches[0]
    for i, branch in enumerate(branches[1:], start=1):
        total = b.add(f"sum{i}", total, branch)
    return b.finish(total)


def summed_loads(
    *, loads: int = 20, rows: int = 64, width: int = 1024, dtype: str = "float32", seed: int = 0
) -> tvm.IRModule:
    """Many inputs summed, normalised by the root of their mean square, read by five consumers.

    ``loads`` inputs ``[rows, width]`` → five results of that shape.
    """
    b = ModuleBuilder(dtype, seed=seed)
    inputs = [b.input(f"x{i}", (rows, width)) for i in range(loads)]
    total = inputs[0]
    for i, value in enumerate(inputs[1:], start=1):
        total = b.add(f"sum{i}", total, value)
    square = b.op("square", relax.op.multiply(total, total))
    mean = b.op("mean", relax.op.mean(square, axis=[-1], keepdims=True))
    mean = b.op("shift", relax.op.add(mean, b.array(np.array(1e-5))))
    norm = b.op("norm", relax.op.multiply(total, b.op("root", relax.op.rsqrt(mean))))
    return b.finish(
        b.relu("relu", norm),
        b.op("sigmoid", relax.op.sigmoid(norm)),
        b.op("tanh", relax.op.tanh(norm)),
        b.op("scaled", relax.op.multiply(norm, b.const(width))),
        b.op("negative", relax.op.negative(norm)),
    )


def elementwise_chain(
    operators: int, *, rows: int = 64, width: int = 64, dtype: str = "float32", seed: int = 0
) -> tvm.IRModule:
    """A chain of ``operators`` elementwise operators, ``z ← x - w·sigmoid(z)`` over and over.

    ``[rows, width]`` → the same shape. The input is read along the whole chain, so that the result
    still depends on it at the end.
    """
    b = ModuleBuilder(dtype, seed=seed)
    x = z = b.input("x", (rows, width))
    for i in range(operators):
        if i % 3 == 0:
            call = relax.op.sigmoid(z)
        elif i % 3 == 1:
            call = relax.op.multiply(z, b.const(width, scale=0.5))
        else:
            call = relax.op.subtract(x, z)
        z = b.op(f"op{i}", call)
    return b.finish(z)


def diamonds(
    operators: int, *, rows: int = 64, width: int = 64, dtype: str = "float32", seed: int = 0
) -> tvm.IRModule:
    """Elementwise operators in diamonds, ``x ← erf(x) + sigmoid(x)``, three operators each.

    ``[rows, width]`` → the same shape. ``operators`` need not be a multiple of three: one or two
    more operators in a row make up the rest.
    """
    b = ModuleBuilder(dtype, seed=seed)
    x = b.input("x", (rows, width))
    for i in range(operators // 3):
        left = b.op(f"left{i}", relax.op.erf(x))
        right = b.op(f"right{i}", relax.op.sigmoid(x))
        x = b.add(f"join{i}", left, right)
    for i in range(operators % 3):
        x = b.op(f"rest{i}", relax.op.erf(x))
    return b.finish(x)


def cross_pair(
    *,
    ratio: int = 1,
    kernels: tuple[int, int] = (3, 3),
    channels: int = 32,
    outputs: int = 32,
    size: int = 28,
    join: str = "add",
    dtype: str = "float32",
    layout: str = "NCHW",
    seed: int = 0,
) -> tvm.IRModule:
    """Two convolutions of equal output, joined, whose work differs by a known ratio.

    The light branch reads ``[1, channels, size, size]``, the heavy one ``[1, ratio·channels, …]``
    (with ``ratio=1`` both read the same input). The ratio of work is
    ``ratio · (kernels[0] / kernels[1])²``: ``kernels`` are (heavy, light). Each branch has a bias and
    a ReLU; ``join`` is a binary operator of Relax (add, multiply, maximum, minimum).
    """
    b = ModuleBuilder(dtype, layout, seed)

    def image(name: str, count: int) -> Any:
        shape = {"N": 1, "C": count, "H": size, "W": size}
        return b.input(name, [shape[axis] for axis in layout])

    light = image("light", channels)
    heavy = light if ratio == 1 else image("heavy", ratio * channels)
    branches = []
    for name, value, kernel in zip(("heavy", "light"), (heavy, light), kernels, strict=True):
        y = b.bias(f"{name}_bias", b.conv(f"{name}_conv", value, outputs, kernel))
        branches.append(b.relu(f"{name}_relu", y))
    return b.finish(b.op("join", getattr(relax.op, join)(*branches)))


def concatenated_sums(
    *, channels: int = 16, size: int = 64, dtype: str = "float32"
) -> tvm.IRModule:
    """Nine sums, concatenated three by three and then together, max-pooled (2×2, stride 2), and added to twice.

    Ten inputs ``[1, channels, size, size]`` → two results ``[1, 9 * channels, size / 2, size / 2]``. In one kernel,
    every element of the concatenation would have to find out which of the nine sums it belongs to.
    """
    b = ModuleBuilder(dtype)
    shape = (1, channels, size, size)
    shared = b.input("y", shape)
    sums = [b.add(f"sum{i}", b.input(f"x{i}", shape), shared) for i in range(9)]
    threes = [b.concat(f"concat{i}", sums[3 * i : 3 * i + 3]) for i in range(3)]
    whole = b.concat("concat", threes)
    pooled = b.op("pool", relax.op.nn.max_pool2d(whole, pool_size=2, strides=2))
    half = b.const(1, 9 * channels, size // 2, size // 2)
    return b.finish(b.bias("left", pooled), b.add("right", pooled, half))
