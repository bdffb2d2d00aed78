"""Import of torch.export programs."""

from __future__ import annotations

import numpy as np
import pytest

from tvm_fusion.errors import InvalidModelError, UnsupportedOperatorError
from tvm_fusion.frontend import load
from tvm_fusion.frontend import torch as frontend

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")


class Net(torch.nn.Module):
    """Convolution, batch norm, dropout, linear layer; two outputs."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(8)
        self.head = torch.nn.Linear(8, 4)
        self.dropout = torch.nn.Dropout()

    def forward(self, x):
        features = torch.relu(self.norm(self.conv(x)))
        return self.head(self.dropout(features.mean((2, 3)))), torch.nn.functional.gelu(features)


def export(net, *inputs, **kwargs):
    """Return the exported program of a network in evaluation mode."""
    torch.manual_seed(0)
    return torch.export.export(net.eval(), inputs, **kwargs)


def test_names_outputs_and_numbers(run_module, operators):
    net, x = Net(), torch.randn(1, 3, 8, 8)
    mod = frontend.load(export(net, x))
    assert operators(mod) == [
        ("conv2d", "nn.conv2d"), ("batch_norm", "add"), ("relu", "nn.relu"), ("mean", "mean"), ("linear", "matmul"),
        ("linear", "add"), ("gelu", "nn.gelu"),
    ]  # fmt: skip
    assert [param.name for param in mod["main"].params] == ["x"]
    for got, want in zip(run_module(mod, x.numpy()), net(x), strict=True):
        np.testing.assert_allclose(got, want.detach().numpy(), rtol=1e-4, atol=1e-5)


def test_a_single_output_is_no_tuple(tmp_path, run_module):
    net, x = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), torch.randn(2, 4)
    torch.export.save(export(net, x), tmp_path / "net.pt2")
    mod = load(tmp_path / "net.pt2")
    assert hasattr(mod["main"].ret_ty, "dtype")
    np.testing.assert_allclose(
        run_module(mod, x.numpy())[0], net(x).detach().numpy(), rtol=1e-4, atol=1e-5
    )


def test_weights_are_copied(run_module):
    net, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    mod = frontend.load(export(net, x))
    expected = net(x).detach().numpy()
    with torch.no_grad():
        net.weight.zero_()
    np.testing.assert_allclose(run_module(mod, x.numpy())[0], expected, rtol=1e-4, atol=1e-5)


def test_bfloat16_weights():
    net = torch.nn.Linear(4, 4).to(torch.bfloat16)
    mod = frontend.load(export(net, torch.randn(2, 4).to(torch.bfloat16)))
    assert str(mod["main"].ret_ty.dtype) == "bfloat16"


def test_dynamic_dimensions():
    batch = torch.export.Dim("batch", min=2, max=64)
    program = export(torch.nn.Linear(4, 4), torch.randn(2, 4), dynamic_shapes={"input": {0: batch}})
    assert not str(frontend.load(program)["main"].params[0].ty.shape.values[0]).isdigit()
    fixed = frontend.load(program, shape={"input": (8, 4)})
    assert [int(dim) for dim in fixed["main"].ret_ty.shape.values] == [8, 4]
    with pytest.raises(ValueError, match="no input 'x'; the model's inputs are input="):
        frontend.load(program, shape={"x": (8, 4)})


class Doubled(torch.nn.Module):
    """Computes with its sizes: the second input is one longer than the first."""

    def forward(self, x, y):
        return torch.cat([x.flatten(), y.flatten()]).view(-1, 3).sum(0) / x.shape[0]


def test_computed_sizes(run_module):
    batch = torch.export.Dim("batch", min=2, max=16)
    program = export(
        Doubled(), torch.randn(4, 3), torch.randn(5, 3), dynamic_shapes=({0: batch}, {0: batch + 1})
    )
    mod = frontend.load(program, shape={"x": (6, 3)})
    assert [[int(n) for n in p.ty.shape.values] for p in mod["main"].params] == [[6, 3], [7, 3]]
    x, y = torch.randn(6, 3), torch.randn(7, 3)
    (got,) = run_module(mod, x.numpy(), y.numpy())
    np.testing.assert_allclose(got, Doubled()(x, y).numpy(), rtol=1e-5)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"x": (40, 3)}, "exported for sizes from 2 to 16, not 40"),
        ({"x": (6, 3), "y": (9, 3)}, r"dimension .* of input 'y' cannot be 9"),
        ({"x": (6, 4)}, "input 'x' has a static shape that"),
        ({"x": (6, 3, 1)}, "input 'x' does not have 3 dimensions"),
    ],
)
def test_sizes_that_do_not_fit(shape, message):
    batch = torch.export.Dim("batch", min=2, max=16)
    program = export(
        Doubled(), torch.randn(4, 3), torch.randn(5, 3), dynamic_shapes=({0: batch}, {0: batch + 1})
    )
    with pytest.raises(ValueError, match=message):
        frontend.load(program, shape=shape)


class Scaled(torch.nn.Module):
    """Takes more than tensors, as many models of language do: an optional mask, a flag, a factor."""

    def forward(self, x, mask=None, factor=1, flag=False, *, bias=None):
        x = x if mask is None else x + mask
        return (x * factor if flag else x) + (0 if bias is None else bias)


def test_inputs_that_are_no_tensors_are_part_of_the_program(run_module):
    x, bias = torch.randn(4, 3), torch.randn(4, 3)
    program = torch.export.export(Scaled(), (x, None, 3, True), {"bias": bias})
    mod = frontend.load(program)
    assert [param.name for param in mod["main"].params] == ["x", "bias"]
    (got,) = run_module(mod, x.numpy(), bias.numpy())
    np.testing.assert_allclose(got, (3 * x + bias).numpy(), rtol=1e-5)


def test_sizes_beside_inputs_that_are_no_tensors(run_module):
    sizes = ({0: torch.export.Dim("batch", min=2, max=16)}, None, None, None)
    program = torch.export.export(
        Scaled(), (torch.randn(4, 3), None, 3, True), dynamic_shapes=sizes
    )
    mod = frontend.load(program, shape={"x": (5, 3)})
    x = torch.randn(5, 3)
    np.testing.assert_allclose(run_module(mod, x.numpy())[0], 3 * x.numpy(), rtol=1e-5)


def test_numbers_that_vary_are_named():
    sizes = (None, None, torch.export.Dim.DYNAMIC, None)
    program = torch.export.export(Scaled(), (torch.randn(4), None, 3, True), dynamic_shapes=sizes)
    with pytest.raises(UnsupportedOperatorError, match="input 'factor' of the program is not a"):
        frontend.load(program)


def test_missing_operators_are_named():
    class Fft(torch.nn.Module):
        def forward(self, x):
            return torch.fft.fft(x).real

    with pytest.raises(UnsupportedOperatorError, match=r"fft.*\(node 'fft_fft'\)"):
        frontend.load(export(Fft(), torch.randn(4)))


def test_bad_files(tmp_path):
    torch.export.save(export(torch.nn.Linear(4, 4), torch.randn(2, 4)), tmp_path / "net.pt2")
    whole = (tmp_path / "net.pt2").read_bytes()
    (tmp_path / "short.pt2").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InvalidModelError, match="truncated"):
        load(tmp_path / "short.pt2")
    for position in range(100, len(whole), len(whole) // 20):
        (tmp_path / "flipped.pt2").write_bytes(
            whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :]
        )
        try:
            load(tmp_path / "flipped.pt2")
        except InvalidModelError:
            continue  # a flip in padding is harmless; any other must be this error
    with pytest.raises(InvalidModelError, match=r"torch\.export\.export first"):
        frontend.load(torch.nn.Linear(4, 4))


@pytest.mark.parametrize("layer", ["SELU", "ELU", "CELU"])
def test_every_factor_of_elu_counts(layer, run_module):
    """TVM's own converter keeps alpha alone: SELU would come out without its scale of 1.05."""
    net = getattr(torch.nn, layer)()
    x = torch.linspace(-3, 3, 24).reshape(2, 3, 4)
    mod = frontend.load(torch.export.export(net, (x,)))
    (got,) = run_module(mod, x.numpy())
    assert np.allclose(got, net(x).numpy(), atol=1e-6)


@pytest.mark.parametrize("affine", [True, False])
def test_group_norm_without_weights(affine, run_module):
    """TVM's own converter fails on it."""
    net = torch.nn.GroupNorm(2, 6, affine=affine)
    x = torch.randn(2, 6, 5, 3)
    (got,) = run_module(frontend.load(torch.export.export(net, (x,))), x.numpy())
    np.testing.assert_allclose(got, net(x).detach().numpy(), atol=1e-5)
