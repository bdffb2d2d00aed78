"""Attention as decoders have it: windows, biases of positions, soft caps, sinks, normed and rotated heads, caches."""

from __future__ import annotations

import numpy as np
import pytest

import tvm_fusion as tf
from tvm_fusion.targets import parse_target
from tvm_fusion.testing.emulated_plan import EmulatedPlan

torch = pytest.importorskip("torch")
pytest.importorskip("onnx")

HEADS, OWN, WIDTH, LENGTH = 4, 2, 32, 24
HIDDEN = HEADS * WIDTH


class Decoder(torch.nn.Module):
    """Attention with fewer heads of keys and values, whose scores are changed in one of the ways of ``FORMS``."""

    FORMS = ("window", "alibi", "relative", "capped", "normed", "sink")

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.queries = torch.nn.Linear(HIDDEN, HIDDEN)
        self.keys, self.values = (torch.nn.Linear(HIDDEN, OWN * WIDTH) for _ in range(2))
        self.biases = torch.nn.Embedding(17, HEADS)
        self.norms = torch.nn.ParameterList([torch.rand(WIDTH) + 0.5 for _ in range(2)])
        self.sinks = torch.nn.Parameter(torch.randn(HEADS))

    def normed(self, x, weight):
        """Qwen3: each head's root mean square, in float32."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return weight * wide.to(x.dtype)

    def heads(self, x):
        parts = [
            layer(x).view(*x.shape[:2], -1, WIDTH)
            for layer in (self.queries, self.keys, self.values)
        ]
        if self.form == "normed":
            parts[:2] = [self.normed(*pair) for pair in zip(parts[:2], self.norms, strict=True)]
        return [part.transpose(1, 2) for part in parts]

    def repeated(self, x):
        """Each head of keys and values for several ones of queries."""
        wide = x[:, :, None].expand(-1, -1, HEADS // OWN, -1, -1)
        return wide.reshape(x.shape[0], HEADS, x.shape[2], WIDTH)

    def changed(self, scores):
        places = torch.arange(scores.shape[-1])
        distance = places[:, None] - places[None]
        if self.form == "window":  # Mistral
            return scores.masked_fill((distance < 0) | (distance >= 8), float("-inf"))
        if self.form == "relative":  # T5
            index = distance.clamp(-8, 8) + 8
            return scores + self.biases(index).permute(2, 0, 1)[None]
        if self.form == "alibi":
            slopes = 2.0 ** -torch.arange(1, HEADS + 1)
            scores = scores - slopes[:, None, None] * distance
        if self.form == "capped":  # Gemma 2
            scores = torch.tanh(scores / 5.0) * 5.0
        return scores.masked_fill(distance < 0, torch.finfo(scores.dtype).min)

    def weights(self, scores):
        if self.form != "sink":
            return torch.softmax(scores, -1)
        sinks = self.sinks.reshape(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], -1)
        return torch.softmax(torch.cat([scores, sinks], -1), -1)[..., :-1]  # gpt-oss

    def forward(self, x):
        q, k, v = self.heads(x)
        scores = q @ self.repeated(k).transpose(-1, -2) / WIDTH**0.5
        mixed = self.weights(self.changed(scores)) @ self.repeated(v)
        return mixed.transpose(1, 2).reshape(x.shape)


class Step(Decoder):
    """New places behind a cache, rotated (LLaMA)."""

    def __init__(self) -> None:
        super().__init__("")

    def forward(self, x, past_keys, past_values, cosines, sines):
        q, k, v = self.heads(x)

        def rotated(part):
            low, high = part.chunk(2, -1)
            return part * cosines + torch.cat([-high, low], -1) * sines

        k = torch.cat([past_keys, rotated(k)], 2)
        v = torch.cat([past_values, v], 2)
        scores = rotated(q) @ self.repeated(k).transpose(-1, -2) / WIDTH**0.5
        mixed = torch.softmax(scores, -1) @ self.repeated(v)
        return mixed.transpose(1, 2).reshape(x.shape), k, v


def load(model, inputs, export: str, path):
    if export == "torch":
        program = torch.export.export(model.eval(), inputs)
        return tf.frontend.torch.load(program, dtype="float16")
    torch.onnx.export(model.eval(), inputs, path, opset_version=17, dynamo=False)
    return tf.frontend.onnx.load(path, dtype="float16")


def check(module, model, inputs) -> list[str]:
    """Compare with PyTorch in float32; the templates of the kernels."""
    plan = EmulatedPlan(module, parse_target("cuda:sm_90"))
    with torch.no_grad():
        want = model(*inputs)
    want = want if isinstance(want, tuple) else (want,)
    for found, one in zip(plan(*(x.numpy().astype("float16") for x in inputs)), want, strict=True):
        error = np.abs(np.asarray(found, "float64") - one.double().numpy()).max()
        assert error <= 6e-3 * max(1.0, float(one.abs().max()))
    return list(plan.templates.values())


EXPORTS = ("torch", pytest.param("onnx", marks=pytest.mark.slow))


@pytest.mark.parametrize("export", EXPORTS)
@pytest.mark.parametrize("form", Decoder.FORMS)
def test_one_kernel_for_the_softmax(form: str, export: str, tmp_path) -> None:
    torch.manual_seed(0)
    model, inputs = Decoder(form), (torch.randn(2, LENGTH, HIDDEN),)
    templates = check(load(model, inputs, export, tmp_path / "m.onnx"), model, inputs)
    assert templates.count("attention") == 1


@pytest.mark.parametrize("export", EXPORTS)
@pytest.mark.parametrize(("new", "past"), [(1, 31), (8, 16)])
def test_a_step_behind_a_cache(new: int, past: int, export: str, tmp_path) -> None:
    torch.manual_seed(0)
    caches = [torch.randn(2, OWN, past, WIDTH) for _ in range(2)]
    angles = torch.rand(1, 1, new, WIDTH)
    inputs = (torch.randn(2, new, HIDDEN), *caches, angles.cos(), angles.sin())
    model = Step()
    templates = check(load(model, inputs, export, tmp_path / "m.onnx"), model, inputs)
    assert templates.count("attention") == 1


class Packed(torch.nn.Module):
    """GPT-2's one product for queries, keys and values, whose weights are inputs."""

    def forward(self, x, weight, bias):
        made = torch.addmm(bias, x.view(-1, HIDDEN), weight).view(*x.shape[:2], -1)
        q, k, v = (
            part.view(*x.shape[:2], HEADS, WIDTH).transpose(1, 2)
            for part in made.split(HIDDEN, dim=2)
        )
        mixed = torch.softmax(q @ k.transpose(-1, -2) / WIDTH**0.5, -1) @ v
        return mixed.transpose(1, 2).reshape(x.shape)


@pytest.mark.parametrize("export", ["torch", "onnx"])
def test_a_joint_product_is_read_in_place(export: str, tmp_path) -> None:
    """The product and attention, nothing between them."""
    torch.manual_seed(0)
    inputs = (
        torch.randn(2, LENGTH, HIDDEN),
        torch.randn(HIDDEN, 3 * HIDDEN) / HIDDEN**0.5,
        torch.randn(3 * HIDDEN),
    )
    templates = check(load(Packed(), inputs, export, tmp_path / "m.onnx"), Packed(), inputs)
    assert sorted(t for t in templates if t != "default") == ["attention", "tensor_core"]
