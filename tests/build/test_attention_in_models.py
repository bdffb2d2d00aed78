"""Attention layers and blocks as PyTorch and ONNX export them, by emulation of their plans' kernels."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import tvm_fusion as tf
from tvm_fusion.targets import parse_target
from tvm_fusion.testing.emulated_plan import EmulatedPlan

torch = pytest.importorskip("torch")
pytest.importorskip("onnx")

from tvm_fusion.testing import attention_models  # noqa: E402
from tvm_fusion.testing.attention_models import (  # noqa: E402
    Block,
    CachedAttention,
    JointAttention,
    Upcast,
)

TOLERANCE = {"float16": 4e-3, "bfloat16": 3e-2}

EXPORTS = ("torch", "onnx")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def load(tmp_path):
    """Load a model by way of torch.export, or of ONNX."""

    def loader(model, inputs, export: str, dtype: str | None = "float16", opset: int = 17):
        if export == "torch":
            program = torch.export.export(model.eval(), inputs)
            return tf.frontend.torch.load(program, dtype=dtype)
        path = tmp_path / "model.onnx"
        if export == "dynamo":
            pytest.importorskip("onnxscript")
        torch.onnx.export(
            model.eval(), inputs, path, opset_version=opset, dynamo=export == "dynamo"
        )
        return tf.frontend.onnx.load(path, dtype=dtype)

    return loader


def check(module, model, inputs, dtype: str = "float16") -> EmulatedPlan:
    """Emulate a model; compare it with PyTorch's float32 results."""
    plan = EmulatedPlan(module, parse_target("cuda:sm_90"))
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    arrays = [
        x.float().numpy().astype(kind) if x.is_floating_point() else x.numpy() for x in inputs
    ]
    with torch.no_grad():
        want = model(*inputs)
    want = want if isinstance(want, tuple) else (want,)
    for found, one in zip(plan(*arrays), want, strict=True):
        found, one = np.asarray(found, "float64"), one.double().numpy()
        assert (np.isnan(found) == np.isnan(one)).all()
        largest = max(1.0, np.nan_to_num(np.abs(one)).max())
        assert np.nan_to_num(np.abs(found - one)).max() <= TOLERANCE[dtype] * largest
    return plan


def kernels(plan: EmulatedPlan) -> list[str]:
    return sorted(name for name in plan.templates.values() if name != "default")


def shifts(plan: EmulatedPlan, module) -> list[int | None]:
    """What the cost model takes causal masks for."""
    from tvm_fusion.strategies.attention import read_attention
    from tvm_fusion.testing.plans import graph_of

    graph = graph_of(module)
    return [read_attention(graph, o).shift for o in graph.operators if o.op == "softmax"]


@pytest.mark.parametrize("export", EXPORTS)
@pytest.mark.parametrize("form", attention_models.JOINT)
def test_one_layer_for_queries_keys_and_values(form, export, load):
    """Its result is read in place: no kernel takes it apart."""
    model, inputs = JointAttention(form), (torch.randn(2, 24, 64),)
    plan = check(load(model, inputs, export), model, inputs)
    assert kernels(plan) == ["attention", "tensor_core", "tensor_core"]


@pytest.mark.parametrize("export", EXPORTS)
@pytest.mark.parametrize("mask", attention_models.CAUSAL)
def test_causal_masks(mask, export, load, monkeypatch):
    from tvm_fusion.schedules.cuda.attention import template

    limits, write = [], template.attention_kernel
    monkeypatch.setattr(
        template, "attention_kernel", lambda form, tile: limits.append(form) or write(form, tile)
    )
    model, inputs = JointAttention(mask=mask), (torch.randn(2, 40, 64),)
    module = load(model, inputs, export)
    plan = check(module, model, inputs)
    assert kernels(plan) == ["attention", "tensor_core", "tensor_core"]
    assert limits and all(form.limit.shift == 0 and form.score is None for form in limits)
    assert shifts(plan, module) == [0]


def test_no_mask_is_no_causal_mask(load):
    model, inputs = JointAttention(), (torch.randn(2, 40, 64),)
    module = load(model, inputs, "torch")
    assert shifts(None, module) == [None]


@pytest.mark.parametrize("export", EXPORTS)
@pytest.mark.parametrize("returns", [True, False])
def test_a_cache_of_keys_and_values(returns, export, load):
    """The longer keys and values are written by a kernel of their own, and read by attention."""
    model = CachedAttention(returns)
    inputs = (torch.randn(2, 1, 64), *(torch.randn(2, 2, 40, 32) for _ in range(2)))
    plan = check(load(model, inputs, export), model, inputs)
    assert "attention" in plan.templates.values()


@pytest.mark.parametrize("export", EXPORTS)
@pytest.mark.parametrize("kind", Upcast.KINDS)
def test_float32_in_between(kind, export, load):
    model, inputs = Upcast(kind), tuple(torch.randn(1, 2, 40, 32).half() for _ in range(3))
    plan = check(load(model, inputs, export, None), model, inputs)
    assert kernels(plan) == ["attention"]


@pytest.mark.parametrize("export", EXPORTS)
@pytest.mark.parametrize(("before", "mask"), [(True, "where"), (False, None)])
def test_blocks_with_dropout(before, mask, export, load):
    model, inputs = Block(before, mask), (torch.randn(1, 24, 64),)
    plan = check(load(model, inputs, export), model, inputs)
    assert "attention" in plan.templates.values()


@pytest.mark.parametrize("before", [True, False])
def test_blocks_in_bfloat16(before, load):
    model, inputs = Block(before), (torch.randn(1, 24, 64),)
    plan = check(load(model, inputs, "torch", "bfloat16"), model, inputs, "bfloat16")
    assert "attention" in plan.templates.values()


class Masked(torch.nn.Module):
    """Attention with a mask, rows of which may hide everything."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, q, k, v, mask):
        if self.kind == "library":
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)
        scores = q @ k.transpose(-1, -2) / 8
        if self.kind == "filled":
            scores = scores.masked_fill(~mask, float("-inf"))
        else:
            scores = scores + mask
        return torch.softmax(scores, -1) @ v


@pytest.mark.parametrize(
    ("kind", "truth"),
    [("library", True), ("library", False), ("filled", True), ("added", False)],
)
def test_rows_without_any_key(kind, truth, load):
    """NaN or 0, as PyTorch has it."""
    shown = torch.rand(1, 1, 40, 40) > 0.3
    shown[..., [0, 17, 39], :] = False
    mask = shown if truth else torch.zeros(shown.shape).masked_fill(~shown, float("-inf"))
    model, inputs = Masked(kind), (*(torch.randn(1, 2, 40, 32) for _ in range(3)), mask)
    with torch.no_grad():
        assert torch.isnan(model(*inputs)).any().item() is (kind != "library")
    plan = check(load(model, inputs, "torch"), model, inputs)
    assert "attention" in plan.templates.values()


@pytest.mark.parametrize(
    ("export", "opset"), [*(("onnx", opset) for opset in (14, 15, 16, 17, 18)), ("dynamo", 18)]
)
@pytest.mark.parametrize("truth", [True, False])
def test_the_library_in_onnx(export, opset, truth, load):
    """A mask of truth values selects zeros for weights that are NaN; numbers are added to the scores."""
    shown = torch.rand(1, 1, 40, 40) > 0.3
    mask = shown if truth else torch.zeros(shown.shape).masked_fill(~shown, float("-inf"))
    model, inputs = Masked("library"), (*(torch.randn(1, 2, 40, 32) for _ in range(3)), mask)
    module = load(model, inputs, export, opset=opset)
    if truth:
        assert any(name in str(module) for name in ("isnan", "IsNaN"))
    plan = check(module, model, inputs)
    assert "attention" in plan.templates.values()


def test_the_librarys_rows_without_any_key_in_onnx(load):
    """The older exporter writes minus infinity for hidden scores: rows of it give 0, as PyTorch's do."""
    shown = torch.rand(1, 1, 40, 40) > 0.3
    shown[..., [0, 17, 39], :] = False
    model, inputs = Masked("library"), (*(torch.randn(1, 2, 40, 32) for _ in range(3)), shown)
    plan = check(load(model, inputs, "onnx"), model, inputs)
    assert "attention" in plan.templates.values()


class Strayed(torch.nn.Module):
    """Attention with an operator in the way."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place

    def at(self, place: str, value):
        if place != self.place:
            return value
        return torch.sigmoid(value) if place != "scores" else value.transpose(-1, -2)

    def forward(self, q, k, v):
        scores = q @ self.at("turned", k.transpose(-1, -2)) / 8
        weights = torch.softmax(self.at("scores", scores), -1)
        return self.at("weights", weights) @ v


@pytest.mark.parametrize(
    ("place", "names"),
    [
        ("turned", {"torch": "sigmoid", "onnx": "/Sigmoid"}),
        ("scores", {"torch": "transpose_1", "onnx": "/Transpose_1"}),
        ("weights", {"torch": "sigmoid", "onnx": "/Sigmoid"}),
    ],
)
@pytest.mark.parametrize("export", EXPORTS)
def test_what_is_in_the_way_is_named_as_the_model_names_it(place, names, export, load):
    module = load(Strayed(place), tuple(torch.randn(1, 2, 32, 32) for _ in range(3)), export)
    softmax, name = {"torch": "softmax", "onnx": "/Softmax"}[export], names[export]
    for node in (softmax, name):
        text = str(tf.explain(module, target="cuda:sm_90", node=node))
        assert f"{name} (" in text and f"stops attention around {softmax}" in text


class Rotated(torch.nn.Module):
    """Two rotated inputs with biases, whose kernels share a launch."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.heads, self.width = heads, width
        self.one, self.two = (torch.nn.Parameter(torch.randn(heads * width)) for _ in range(2))

    def rotated(self, x, bias):
        x = (x + bias).view(*x.shape[:2], self.heads, self.width).transpose(1, 2)
        steps = torch.arange(x.shape[2])[:, None] * torch.logspace(0, -3, self.width // 2)[None]
        angles = torch.cat([steps, steps], -1)
        low, high = x.chunk(2, -1)
        return x * angles.cos() + torch.cat([-high, low], -1) * angles.sin()

    def forward(self, x, y):
        return self.rotated(x, self.one), self.rotated(y, self.two)


def test_rotations_in_one_launch_keep_their_offsets(load):
    """TVM's FlattenBuffer would lose what is added to the place in the second one's bias."""
    model, inputs = Rotated(2, 24), tuple(torch.randn(2, 17, 48) for _ in range(2))
    plan = check(load(model, inputs, "torch"), model, inputs)
    assert kernels(plan) == ["partitioned"]


class Multiplied(torch.nn.Module):
    """Attention by sums over named axes, which PyTorch exports with axes of one place that move."""

    def forward(self, q, k, v):
        weights = torch.softmax(torch.einsum("bshd,bthd->bhst", q, k) / 5, -1)
        return torch.einsum("bhst,bthd->bshd", weights, v)


@pytest.mark.parametrize("export", EXPORTS)
def test_sums_over_named_axes(export, load):
    model = Multiplied()
    inputs = (torch.randn(2, 17, 3, 24), *(torch.randn(2, 9, 3, 24) for _ in range(2)))
    plan = check(load(model, inputs, export), model, inputs)
    assert "attention" in kernels(plan)


class Written(torch.nn.Module):
    """A softmax that the model spells out."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def weights(self, scores):
        if self.kind == "log":
            return torch.log_softmax(scores, -1).exp()
        power = torch.exp(scores - scores.amax(-1, keepdim=True))
        if self.kind == "reciprocal":
            return power * (1 / power.sum(-1, keepdim=True))
        return power / power.sum(-1)[..., None]

    def forward(self, q, k, v):
        return self.weights(q @ k.transpose(-1, -2) / 8) @ v


@pytest.mark.parametrize("export", EXPORTS)
@pytest.mark.parametrize("kind", ["log", "reciprocal", "division"])
def test_a_softmax_that_is_written_out(kind, export, load):
    model, inputs = Written(kind), tuple(torch.randn(1, 2, 40, 32) for _ in range(3))
    module = load(model, inputs, export)
    (group,) = tf.plan(module, target="cuda:sm_90").groups
    assert group.options["form"] == "attention"
    if kind == "division" and export == "onnx":
        check(module, model, inputs)


def test_the_softmax_of_older_onnx(load):
    """Before opset 13 it flattened its input to rows."""
    model, inputs = JointAttention(), (torch.randn(2, 24, 64),)
    plan = check(load(model, inputs, "onnx", opset=11), model, inputs)
    assert kernels(plan) == ["attention", "tensor_core", "tensor_core"]


class Sinks(torch.nn.Module):
    """Two keys without values beside the others."""

    def forward(self, q, k, v, sinks):
        scores = torch.cat([q @ k.transpose(-1, -2), sinks], -1)
        return torch.softmax(scores, -1)[..., :-2] @ v


@pytest.mark.parametrize(
    ("model", "shapes", "words"),
    [
        pytest.param(
            torch.nn.functional.scaled_dot_product_attention,
            [(1, 2, 9, 20)] * 3,
            "queries of 20 places a head, which is no multiple of 8",
            id="width",
        ),
        pytest.param(
            torch.nn.functional.scaled_dot_product_attention,
            [(1, 2, 9, 24), (1, 2, 1, 24), (1, 2, 1, 24)],
            "a row has one score only",
            id="one key",
        ),
        pytest.param(
            Sinks(), [(1, 2, 9, 24)] * 3 + [(1, 2, 9, 2)], "it moves scores before", id="sinks"
        ),
    ],
)
def test_why_there_is_no_kernel(model, shapes, words, load):
    class Whole(torch.nn.Module):
        def forward(self, *inputs):
            return model(*inputs)

    module = load(Whole(), tuple(torch.randn(shape) for shape in shapes), "torch")
    plan = tf.plan(module, target="cuda:sm_90")
    details = [r.detail for r in plan.rejected if "stops attention" in r.detail]
    assert details and all(words in detail for detail in details)
