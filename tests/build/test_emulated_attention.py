"""Models with attention as their plans' kernels compute it, as PyTorch and ONNX write it."""

from __future__ import annotations

import numpy as np
import pytest

import tvm_fusion as tf
from tvm_fusion.targets import parse_target
from tvm_fusion.testing.emulated_plan import EmulatedPlan
from tvm_fusion.testing.transformer_blocks import bert_block
from tvm_fusion.verification.reference import Reference

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional

TOLERANCE = 4e-3


class Library(nn.Module):
    """PyTorch's own attention."""

    def __init__(self, **options) -> None:
        super().__init__()
        self.options = options

    def forward(self, q, k, v, *mask):
        return F.scaled_dot_product_attention(q, k, v, *mask, **self.options)


class Written(nn.Module):
    """Attention with a causal mask kept as a buffer."""

    def __init__(self, kind: str, length: int) -> None:
        super().__init__()
        self.kind = kind
        self.register_buffer("mask", torch.tril(torch.ones(length, length)).bool())

    def forward(self, q, k, v):
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        if self.kind == "filled":
            scores = scores.masked_fill(~self.mask, -1e4)
        else:
            scores = scores + torch.where(self.mask, 0.0, float("-inf"))
        return torch.softmax(scores, -1) @ v


def check(model, *inputs):
    """Emulate a model in float16; return its plan."""
    program = torch.export.export(model.eval(), inputs)
    module = tf.frontend.torch.load(program, dtype="float16")
    plan = EmulatedPlan(module, parse_target("cuda:sm_90"))
    arrays = [x.numpy() if x.dtype == torch.bool else x.numpy().astype("float16") for x in inputs]
    with torch.no_grad():
        want = model(*inputs).numpy()
    (found, *_) = plan(*arrays)
    assert np.isfinite(found).all()
    assert np.abs(found - want).max() <= TOLERANCE * max(1.0, np.abs(want).max())
    return plan


def heads(count: int = 4, length: int = 40, width: int = 32):
    return torch.randn(2, count, length, width)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def kernels(plan) -> list[str]:
    return sorted(name for name in plan.templates.values() if name != "default")


@pytest.mark.parametrize(
    ("model", "mask", "templates"),
    [
        pytest.param(Library(), None, ["attention"], id="plain"),
        pytest.param(Library(is_causal=True), None, ["attention"], id="causal"),
        pytest.param(Library(), (2, 1, 40, 40), ["attention"], id="added mask"),
        pytest.param(Library(), "bool", ["attention", "elementwise"], id="truth values"),
        pytest.param(Written("filled", 40), None, ["attention"], id="filled"),
        pytest.param(Written("added", 40), None, ["attention"], id="added causal"),
    ],
)
def test_one_kernel(model, mask, templates):
    inputs = [heads() for _ in range(3)]
    if mask == "bool":
        shown = torch.rand(2, 1, 40, 40) > 0.3
        shown[0, 0, 3] = False  # a row without any key becomes 0
        inputs.append(shown)
    elif mask:
        inputs.append(torch.randn(mask))
    assert kernels(check(model, *inputs)) == templates


def test_grouped_queries_and_lengths():
    model = Library(enable_gqa=True)
    plan = check(model, heads(4, 20), heads(2, 33), heads(2, 33))
    assert kernels(plan) == ["attention"]


def test_multihead_attention():
    class SelfAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.MultiheadAttention(64, 2, batch_first=True)

        def forward(self, x):
            return self.inner(x, x, x, need_weights=False)[0]

    assert "attention" in check(SelfAttention(), torch.randn(2, 24, 64)).templates.values()


def test_a_whole_block():
    module = bert_block(sequence=24, hidden=64, heads=2, dtype="float16")
    plan = EmulatedPlan(module, parse_target("cuda:sm_90"))
    assert "attention" in plan.templates.values()
    x = np.random.default_rng(0).standard_normal((1, 24, 64)).astype("float16")
    (found,), (want,) = plan(x), Reference(module, "float16")(x)
    assert np.abs(found - want).max() <= TOLERANCE * np.abs(want).max()


def test_weights_that_are_a_result_stay_apart():
    class WithWeights(nn.Module):
        def forward(self, q, k, v):
            weights = torch.softmax(q @ k.transpose(-1, -2), -1)
            return weights @ v, weights

    inputs = [heads() for _ in range(3)]
    program = torch.export.export(WithWeights(), tuple(inputs))
    module = tf.frontend.torch.load(program, dtype="float16")
    plan = tf.plan(module, target="cuda:sm_90")
    assert not any(g.options.get("form") == "attention" for g in plan.groups)
    (refusal,) = [r for r in plan.rejected if "stops attention" in r.detail]
    assert refusal.reason == "no_template" and "softmax" in refusal.nodes
    assert "softmax" in str(plan)
