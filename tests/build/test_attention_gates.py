"""What follows attention elementwise, before the projection: gates, scales, residuals in one kernel with it."""

from __future__ import annotations

import numpy as np
import pytest

import tvm_fusion as tf
from tvm_fusion.targets import parse_target
from tvm_fusion.testing.emulated_plan import EmulatedPlan

torch = pytest.importorskip("torch")
pytest.importorskip("onnx")

HEADS, WIDTH = 2, 32
HIDDEN = HEADS * WIDTH


class Gated(torch.nn.Module):
    """Attention with one of its methods behind it."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form

    def forward(self, q, k, v, gate):
        mixed = torch.softmax(q @ k.transpose(-1, -2) / WIDTH**0.5, -1) @ v
        return getattr(self, self.form)(mixed, gate)

    def merged(self, x):
        return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1)

    def hidden(self, mixed, gate):
        return self.merged(mixed) * torch.sigmoid(gate)

    def of_heads(self, mixed, gate):
        gate = gate.view(*gate.shape[:2], HEADS, WIDTH).transpose(1, 2)
        return self.merged(mixed * torch.sigmoid(gate))

    def one_a_head(self, mixed, gate):
        return self.merged(mixed * torch.sigmoid(gate[..., :HEADS]).transpose(1, 2)[..., None])

    def half_of_a_joint_one(self, mixed, gate):
        return self.merged(mixed) * torch.nn.functional.silu(gate[..., HIDDEN:])

    def residual(self, mixed, gate):
        return torch.relu(self.merged(mixed) * 0.5 + gate)

    def gate_is_a_result(self, mixed, gate):
        gate = torch.sigmoid(gate)
        return self.merged(mixed) * gate, gate

    def mixed_is_a_result(self, mixed, gate):
        mixed = self.merged(mixed)
        return mixed * gate, mixed

    def norm(self, mixed, gate):
        return torch.softmax(self.merged(mixed), -1)


def load(form: str, export: str, path, rows: int = 24, keys: int = 20):
    """The model, its inputs and its canonical module."""
    torch.manual_seed(0)
    hidden = 2 * HIDDEN if form == "half_of_a_joint_one" else HIDDEN
    inputs = [torch.randn(2, HEADS, n, WIDTH) for n in (rows, keys, keys)]
    inputs.append(torch.randn(2, rows, hidden))
    model = Gated(form).eval()
    if export == "torch":
        program = torch.export.export(model, tuple(inputs))
        return model, inputs, tf.frontend.torch.load(program, dtype="float16")
    torch.onnx.export(model, tuple(inputs), path, opset_version=17, dynamo=False)
    return model, inputs, tf.frontend.onnx.load(path, dtype="float16")


def check(model, inputs, module, arch: str) -> EmulatedPlan:
    """Compare with PyTorch in float64, of the same float16 operands."""
    narrow = [x.half() for x in inputs]
    with torch.no_grad():
        want = model.double()(*(x.double() for x in narrow))
    want = want if isinstance(want, tuple) else (want,)
    plan = EmulatedPlan(module, parse_target(f"cuda:{arch}"))
    for found, one in zip(plan(*(x.numpy() for x in narrow)), want, strict=True):
        error = np.abs(np.asarray(found, "float64") - one.numpy()).max()
        assert error <= 3e-3 * max(1.0, float(one.abs().max()))
    return plan


@pytest.mark.parametrize("export", ["torch", "onnx"])
@pytest.mark.parametrize(
    "form", ["hidden", "of_heads", "one_a_head", "half_of_a_joint_one", "residual"]
)
def test_one_kernel_and_its_values(form: str, export: str, tmp_path) -> None:
    loaded = load(form, export, tmp_path / "m.onnx")
    for arch in ("sm_80", "sm_90"):
        plan = check(*loaded, arch)
        assert [t for t in plan.templates.values() if t != "default"] == ["attention"]
        assert len(plan.plan.groups) == 1 and not plan.plan.ungrouped


@pytest.mark.parametrize(("rows", "keys"), [(1, 40), (130, 70)])
def test_other_lengths(rows: int, keys: int, tmp_path) -> None:
    plan = check(*load("hidden", "torch", None, rows, keys), "sm_90")
    assert "attention" in plan.templates.values() and plan.plan.totals.launches_after == 1


@pytest.mark.parametrize("form", ["gate_is_a_result", "mixed_is_a_result", "norm"])
def test_what_stays_outside(form: str, tmp_path) -> None:
    """Gates that are results are read; what attention's result must be written for is another kernel."""
    plan = check(*load(form, "torch", None), "sm_90")
    assert list(plan.templates.values()).count("attention") == 1
    assert plan.plan.totals.launches_after == 2
