"""Gates: small products that scale a large tensor; values by emulation, resources by nvcc, and what is no gate."""

from __future__ import annotations

import pytest
from tvm_fusion.schedules import schedule
from tvm_fusion.schedules.allocation import shared_bytes

from tvm_fusion.compat import relax
from tvm_fusion.targets import parse_target
from tvm_fusion.testing import cuda_emulation
from tvm_fusion.testing.modules import ModuleBuilder

op = relax.op

SM90 = parse_target("cuda:sm_90")


def joined(cuda, mod, dtype: str = "float32"):
    """The whole module as one joined cross group."""
    return cuda.group(mod, "cross", dtype, form="joined")


def _shape(b: ModuleBuilder, channels: int, size: int) -> tuple[int, ...]:
    return (1, channels, size, size) if b.layout == "NCHW" else (1, size, size, channels)


def excite(b: ModuleBuilder, channels=40, inner=12, size=8, batch=1, residual=True):
    """The end of squeeze-and-excite by 1x1 convolution: y * sigmoid(conv(p)), with residual and ReLU."""
    at = b.layout.index("C") - 1
    big, small = [batch, size, size], [batch, 1, 1]
    big.insert(at + 1, channels), small.insert(at + 1, inner)
    y, p = b.input("y", big), b.input("p", small)
    gate = b.op("sigmoid", op.sigmoid(b.bias("bias", b.conv("gate", p, channels, 1))))
    scaled = b.op("times", op.multiply(y, gate))
    if not residual:
        return b.finish(scaled)
    return b.finish(b.relu("relu", b.add("add", scaled, b.input("r", big))))


def dense_gate(b: ModuleBuilder, batch=1, size=7, act="sigmoid"):
    """The same with a matrix product and a reshape; the gate's activation is a hard swish or a sigmoid."""
    y, p = b.input("y", (batch, 36, size, size)), b.input("p", (batch, 20))
    gate = b.dense("gate", p, 36)
    if act == "sigmoid":
        gate = b.op("sigmoid", op.sigmoid(gate))
    else:
        shifted = b.op("shift", op.add(gate, relax.const(3.0, b.dtype)))
        cut = b.op("clip", op.clip(shifted, 0.0, 6.0))
        scaled = b.op("sixth", op.multiply(cut, relax.const(1 / 6, b.dtype)))
        gate = b.op("swish", op.multiply(gate, scaled))
    wide = b.op("reshape", op.reshape(gate, (batch, 36, 1, 1)))
    return b.finish(b.op("times", op.multiply(wide, y)))


def two_gates(b: ModuleBuilder):
    """Scale and shift, each from its own product, then an activation (as in FiLM and AdaLN)."""
    y, p = b.input("y", (2, 50, 64)), b.input("p", (2, 40))
    parts = [b.op(f"r{i}", op.reshape(b.dense(f"d{i}", p, 64), (2, 1, 64))) for i in range(2)]
    scaled = b.op("times", op.multiply(y, parts[0]))
    return b.finish(b.op("gelu", op.nn.gelu(b.add("add", scaled, parts[1]))))


def spatial_gate(b: ModuleBuilder):
    """A gate per place (CBAM): a 7x7 convolution to one channel, broadcast over the channels."""
    y, p = b.input("y", _shape(b, 32, 14)), b.input("p", _shape(b, 2, 14))
    gate = b.op("sigmoid", op.sigmoid(b.conv("gate", p, 1, 7)))
    return b.finish(b.op("times", op.multiply(y, gate)))


def bare_gate(b: ModuleBuilder):
    """Without an activation, and with two outputs."""
    y, p = b.input("y", (1, 16, 9, 8)), b.input("p", (1, 5, 1, 1))
    scaled = b.op("times", op.multiply(y, b.conv("gate", p, 16, 1)))
    return b.finish(scaled, b.relu("relu", scaled))


GATES = {
    "excite": excite,
    "excite, prime": lambda b: excite(b, 37, 13, 13, 2),
    "dense": dense_gate,
    "dense, batch": lambda b: dense_gate(b, 3, 8, "hard swish"),
    "two": two_gates,
    "spatial": spatial_gate,
    "bare": bare_gate,
}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", GATES)
def test_gates(cuda, name, dtype):
    cuda.check_group(joined(cuda, GATES[name](ModuleBuilder(dtype)), dtype), "gated")


@pytest.mark.parametrize("name", ["excite", "excite, prime", "spatial"])
def test_gates_channels_last(cuda, name):
    cuda.check_group(joined(cuda, GATES[name](ModuleBuilder(layout="NHWC"))), "gated")


@pytest.mark.parametrize("name", ["excite", "dense, batch", "spatial"])
def test_every_index_of_a_gate_is_right(cuda, name):
    cuda.check_group(joined(cuda, GATES[name](ModuleBuilder())), "gated", positions=True)


def test_a_gate_is_vectorised_where_rows_allow_it(cuda):
    sources = [
        cuda_emulation.cuda_source(schedule(group.func, SM90)[0], SM90)
        for group in (
            joined(cuda, excite(ModuleBuilder(), 32, 8, 56, residual=False)),
            joined(cuda, excite(ModuleBuilder(), 32, 8, 55, residual=False)),
        )
    ]
    assert ["float4" in source for source in sources] == [True, False]


def test_a_block_computes_the_gates_of_its_tile_alone(cuda):
    group = joined(cuda, excite(ModuleBuilder(), 256, 16, 56))
    scheduled, name = schedule(group.func, SM90)
    assert name == "gated"
    # 16 partial sums of each of its channels at most, not of all 256.
    assert shared_bytes(scheduled) <= 4 * 17 * 64


@pytest.mark.nvcc
@pytest.mark.parametrize("arch", ["sm_75", "sm_120"])
@pytest.mark.parametrize("name", GATES)
def test_gates_do_not_spill(cuda, name, arch):
    assert cuda.resources(joined(cuda, GATES[name](ModuleBuilder())).func, arch).registers <= 64


#: The largest and the deepest gates of EfficientNet-B0, and one of a ResNet-50 with squeeze-and-excite.
REAL = {"112": (32, 8, 112), "7": (1152, 48, 7), "56": (256, 16, 56)}


@pytest.mark.nvcc
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90", "sm_90a", "sm_120"])
@pytest.mark.parametrize("name", REAL)
def test_real_gates_do_not_spill(cuda, name, arch):
    group = joined(cuda, excite(ModuleBuilder(), *REAL[name]))
    assert cuda.resources(group.func, arch).registers <= 64


def ungated(cuda, make, *shapes):
    """Whether the template leaves a function alone."""
    return cuda.template("gated").apply(cuda.function(make, *shapes), SM90) is None


def test_a_product_that_is_not_broadcast_is_no_gate(cuda):
    assert ungated(cuda, lambda e, x, w: e(op.nn.relu(e(op.matmul(x, w)))), (8, 16), (16, 24))


def test_a_convolution_times_a_gate_is_no_gated_function(cuda):
    def make(emit, x, w, p, v):
        return emit(op.multiply(emit(op.nn.conv2d(x, w)), emit(op.nn.conv2d(p, v))))

    assert ungated(cuda, make, (1, 8, 9, 9), (12, 8, 3, 3), (1, 6, 1, 1), (12, 6, 1, 1))


def test_a_costly_product_is_no_gate(cuda):
    """64 rows of 512 products each, every value met four times: registers have to be tiled."""

    def make(emit, y, x, w):
        return emit(op.multiply(y, emit(op.reshape(emit(op.matmul(x, w)), (64, 512, 1)))))

    assert ungated(cuda, make, (64, 512, 4), (64, 512), (512, 512))
    assert not ungated(cuda, make, (64, 512, 49), (64, 64), (64, 512))


def test_products_in_sequence_are_no_gates(cuda):
    def make(emit, y, p, w, v):
        inner = emit(op.nn.relu(emit(op.matmul(p, w))))
        gate = emit(op.sigmoid(emit(op.matmul(inner, v))))
        return emit(op.multiply(y, emit(op.reshape(gate, (1, 32, 1, 1)))))

    assert ungated(cuda, make, (1, 32, 9, 9), (1, 32), (32, 8), (8, 32))


def test_reductions_of_rows_are_no_gates(cuda):
    def divided(emit, x, y):
        total = emit(op.sum(emit(op.multiply(x, y)), [-1], keepdims=True))
        return emit(op.divide(x, total))

    assert ungated(cuda, divided, (20, 64), (20, 64))
    assert ungated(cuda, lambda e, x: e(op.nn.softmax(x)), (20, 64))
    assert ungated(cuda, lambda e, x, y: e(op.add(x, y)), (20, 64), (20, 64))
