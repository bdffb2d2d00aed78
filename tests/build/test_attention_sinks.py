"""Attention sinks and softmax1 as PyTorch models and their ONNX files have them: one kernel, and its values."""

from __future__ import annotations

import numpy as np
import pytest

import tvm_fusion as tf
from tvm_fusion.targets import parse_target
from tvm_fusion.testing.emulated_plan import EmulatedPlan

torch = pytest.importorskip("torch")
pytest.importorskip("onnx")

HEADS, LENGTH, WIDTH = 3, 24, 32


class Model(torch.nn.Module):
    """Attention, between whose products a method of this class stands."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.sinks = torch.nn.Parameter(torch.tensor([-1.0, 0.5, 3.0]))

    def forward(self, q, k, v, *more):
        scores = q @ k.transpose(-1, -2) / WIDTH**0.5
        mixed = getattr(self, self.form)(scores, *more) @ v
        return mixed.transpose(1, 2).reshape(q.shape[0], q.shape[2], -1)

    def hidden(self, scores):
        places = torch.arange(LENGTH)
        return scores.masked_fill(places[None] > places[:, None], float("-inf"))

    def column(self, scores):
        return self.sinks.reshape(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], -1)

    def gpt_oss(self, scores):
        """As transformers writes it: the largest is subtracted before."""
        joined = torch.cat([self.hidden(scores), self.column(scores)], -1)
        joined = joined - joined.max(-1, keepdim=True).values
        return torch.softmax(joined, -1)[..., :-1]

    def column_first(self, scores):
        return torch.softmax(torch.cat([self.column(scores), scores], -1), -1)[..., 1:]

    def wide_softmax(self, scores):
        joined = torch.cat([scores, self.column(scores)], -1)
        return torch.softmax(joined, -1, dtype=torch.float32).to(scores.dtype)[..., :-1]

    def masked_column(self, scores, mask):
        return torch.softmax(torch.cat([scores + mask, self.column(scores)], -1), -1)[..., :-1]

    def written_out(self, scores):
        sinks = self.sinks.reshape(1, -1, 1, 1)
        most = torch.maximum(scores.max(-1, keepdim=True)[0], sinks)
        power = torch.exp(scores - most)
        return power / (power.sum(-1, keepdim=True) + torch.exp(sinks - most))

    def softmax1(self, scores):
        power = torch.exp(scores)
        return power / (1 + power.sum(-1, keepdim=True))

    def softmax1_shifted(self, scores):
        scores = self.hidden(scores)
        most = scores.max(-1, keepdim=True)[0].clamp(min=0)
        power = torch.exp(scores - most)
        return power / (torch.exp(-most) + power.sum(-1, keepdim=True))

    def softmax_one(self, scores):
        """What is called so adds 1 to the sum relative to the largest."""
        power = torch.exp(scores - scores.max(-1, keepdim=True)[0])
        return power / (1 + power.sum(-1, keepdim=True))

    def two_columns(self, scores):
        column = self.column(scores)
        return torch.softmax(torch.cat([scores, column, column], -1), -1)[..., :-2]

    def of_queries(self, scores):
        return torch.softmax(scores, -2)

    def squared(self, scores):
        power = torch.exp(scores)
        return power / (power.sum(-1, keepdim=True) + power.sum(-1, keepdim=True).square())


def load(form: str, export: str, path):
    """The model, its inputs and its canonical module."""
    torch.manual_seed(0)
    model = Model(form).eval()
    inputs = [torch.randn(2, HEADS, LENGTH, WIDTH) for _ in range(3)]
    if form == "masked_column":
        mask = torch.zeros(2, 1, LENGTH, LENGTH)
        mask[:, :, 3], mask[0, :, 5, 2:] = float("-inf"), float("-inf")
        inputs.append(mask)
    if export == "torch":
        program = torch.export.export(model, tuple(inputs))
        return model, inputs, tf.frontend.torch.load(program, dtype="float16")
    torch.onnx.export(model, tuple(inputs), path, opset_version=17, dynamo=False)
    return model, inputs, tf.frontend.onnx.load(path, dtype="float16")


ONE = (
    "gpt_oss", "column_first", "wide_softmax", "masked_column", "written_out", "softmax1", "softmax1_shifted",
    "softmax_one",
)  # fmt: skip


@pytest.mark.parametrize("export", ["torch", "onnx"])
@pytest.mark.parametrize("form", ONE)
def test_one_kernel_and_its_values(form: str, export: str, tmp_path) -> None:
    """Against PyTorch in float64, of the same float16 operands."""
    model, inputs, module = load(form, export, tmp_path / "m.onnx")
    narrow = [x.half() for x in inputs]
    with torch.no_grad():
        want = model.half().double()(*(x.double() for x in narrow)).numpy()
    assert np.isfinite(want).all()
    for arch in ("sm_80", "sm_90"):
        plan = EmulatedPlan(module, parse_target(f"cuda:{arch}"))
        assert [t for t in plan.templates.values() if t != "default"] == ["attention"]
        assert len(plan.plan.groups) == 1 and not plan.plan.ungrouped
        (found,) = plan(*(x.numpy() for x in narrow))
        error = np.abs(np.asarray(found, "float64") - want).max()
        assert error <= 2e-3 * max(1.0, np.abs(want).max())


@pytest.mark.parametrize("export", ["torch", "onnx"])
@pytest.mark.parametrize(
    ("form", "op"), [("two_columns", "concat"), ("of_queries", "softmax"), ("squared", "add")]
)
def test_other_forms_are_named(form: str, op: str, export: str, tmp_path) -> None:
    _, _, module = load(form, export, tmp_path / "m.onnx")
    plan = tf.plan(module, target="cuda:sm_90")
    assert "attention" not in [group.options.get("form") for group in plan.groups]
    details = {(r.detail, r.numbers["op"]) for r in plan.rejected if "stops attention" in r.detail}
    assert [kind for _, kind in details] == [op]


@pytest.mark.parametrize("form", ["gpt_oss", "written_out", "softmax_one"])
def test_strict_groups_round_what_each_operator_gives(form: str, tmp_path) -> None:
    """On CPUs; a GPU's kernel keeps scores and weights, and is refused."""
    _, inputs, module = load(form, "torch", None)
    strict = tf.FusionConfig(numerics="strict")
    assert [g.options.get("form") for g in tf.plan(module, "llvm", strict).groups] == ["attention"]
    apart = tf.FusionConfig(numerics="strict", max_operators=1)
    arrays = [x.half().numpy() for x in inputs]
    one, other = (
        np.asarray(tf.compile(module, "llvm", config=config)(*arrays)) for config in (strict, apart)
    )
    assert one.any()
    np.testing.assert_array_equal(one, other)
    refused = [r for r in tf.plan(module, "cuda:sm_90", strict).rejected if r.reason == "numerics"]
    assert refused
