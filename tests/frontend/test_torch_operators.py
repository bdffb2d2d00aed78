"""ATen operators, imported and run by plain TVM, against PyTorch itself."""

from __future__ import annotations

import numpy as np
import pytest

import tvm_fusion as tf
from tvm_fusion.errors import UnsupportedOperatorError
from tvm_fusion.frontend import torch as frontend

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
functional = torch.nn.functional


class Calls(torch.nn.Module):
    """Several functions of the same inputs: compiling one program for all of them is faster."""

    def __init__(self, *functions):
        super().__init__()
        self.functions = functions

    def forward(self, *inputs):
        return tuple(function(*inputs) for function in self.functions)


@pytest.fixture
def agrees(run_module):
    """Return a function that checks functions of some inputs against PyTorch, types and shapes included.

    ``compiled``: by this package's own kernels, not by TVM's.
    """

    def check(functions, *inputs, rtol=1e-5, atol=1e-6, compiled=False):
        net = Calls(*functions)
        mod = frontend.load(torch.export.export(net, inputs))
        arrays = [tensor.numpy() for tensor in inputs]
        if compiled:
            results = tf.compile(mod, "llvm", verify=False)(*arrays)
        else:
            results = run_module(mod, *arrays)
        expected = torch.utils._pytree.tree_leaves(net(*inputs))
        for index, (got, wanted) in enumerate(zip(results, expected, strict=True)):
            assert got.dtype == wanted.numpy().dtype, index
            np.testing.assert_allclose(
                got, wanted.numpy(), rtol=rtol, atol=atol, err_msg=f"output {index}"
            )

    return check


def image(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


ARITHMETIC = [
    lambda x, y, n: torch.add(x, y, alpha=-3),
    lambda x, y, n: torch.sub(x, y, alpha=0.5),
    lambda x, y, n: torch.add(x, 2, alpha=3),
    lambda x, y, n: torch.rsub(x, y, alpha=2),
    lambda x, y, n: 2 - n,
    lambda x, y, n: 2.5 - n,
    lambda x, y, n: n * 0.5,
    lambda x, y, n: n / 2,
    lambda x, y, n: n + x,
    lambda x, y, n: n > 1.5,
    lambda x, y, n: x == n,
    lambda x, y, n: torch.div(x, y, rounding_mode="floor"),
    lambda x, y, n: torch.div(x, 0.3, rounding_mode="trunc"),
    lambda x, y, n: torch.div(n, 2, rounding_mode="floor"),
    lambda x, y, n: torch.div(n, 2, rounding_mode="trunc"),
    lambda x, y, n: torch.clamp_max(x, 0.5),
    lambda x, y, n: torch.clamp_min(x, 0.25),
    lambda x, y, n: torch.clamp(x, max=0.5),
    lambda x, y, n: torch.clamp(x, y, 1.5 * y.abs()),
    lambda x, y, n: torch.clamp(n, -0.5, 1.5),
    lambda x, y, n: torch.clamp(x, 0.5, -0.5),
    lambda x, y, n: torch.isnan(torch.sqrt(x)) & (x != x) | torch.isfinite(1 / n),
    lambda x, y, n: (x > 0) * (y > 0),
    lambda x, y, n: (x > 0) + (y > 0),
    lambda x, y, n: torch.logaddexp(x, y),
    lambda x, y, n: torch.log1p(x.abs() * 1e-6) * 1e6,
]


def test_arithmetic(agrees):
    """Stock TVM ignores ``alpha``, computes n * 0.5 as n * 0 and loses the bound of clamp_max."""
    agrees(ARITHMETIC, image(3, 4), image(4), torch.tensor([-3, 0, 2, 5]))


REDUCTIONS = [
    lambda x, n: x.amax(1),
    lambda x, n: x.amin((0, -1), keepdim=True),
    lambda x, n: torch.amax(x, ()),
    lambda x, n: (x > 0).amax(0),
    lambda x, n: n.any(1),
    lambda x, n: n.bool().all(0, keepdim=True),
    lambda x, n: n.all(),
    lambda x, n: x.sum((0, 2)),
    lambda x, n: x.var((1, 2), correction=0),
    lambda x, n: x.std(),
    lambda x, n: x.argmax(1),
    lambda x, n: x.norm(dim=1),
    lambda x, n: n.sum(),
]


def test_reductions(agrees):
    agrees(REDUCTIONS, image(2, 3, 4), torch.tensor([[0, 2, 0], [1, 1, 3]]))


RESIZES = [
    lambda x: functional.interpolate(x, scale_factor=2, mode="nearest"),
    lambda x: functional.interpolate(x, size=(5, 13), mode="nearest"),
    lambda x: functional.interpolate(x, scale_factor=1.7, mode="nearest"),
    lambda x: functional.interpolate(x, scale_factor=2.6, mode="bilinear"),
    lambda x: functional.interpolate(x, size=(13, 5), mode="bilinear"),
    lambda x: functional.interpolate(x, size=(13, 5), mode="bilinear", align_corners=True),
    lambda x: functional.interpolate(x, size=(3, 20), mode="bilinear", antialias=True),
    lambda x: functional.interpolate(x, scale_factor=0.6, mode="bicubic"),
    lambda x: functional.interpolate(x, size=(20, 3), mode="bicubic"),
    lambda x: functional.interpolate(x, size=(3, 4), mode="bicubic", antialias=True),
]


POOLS = [
    lambda x: functional.avg_pool2d(x, 3, 2, 1, divisor_override=2),
    lambda x: functional.avg_pool2d(x, (2, 3), ceil_mode=True, divisor_override=-5),
    lambda x: functional.avg_pool2d(x[0], 3, 2, 1, ceil_mode=True, count_include_pad=False),
    lambda x: functional.avg_pool2d(x, 3, 2, 1, ceil_mode=True),
    lambda x: functional.max_pool2d(x, 3, 2, 1, ceil_mode=True),
    lambda x: functional.adaptive_avg_pool2d(x, (3, 4)),
]


def test_pooling(agrees):
    agrees(POOLS, image(1, 2, 7, 9))


def test_resizes(agrees):
    """TVM's own converters take nearest neighbours by rounding, recompute scale factors and ignore antialiasing."""
    agrees(RESIZES, image(1, 2, 7, 9), rtol=1e-4, atol=1e-5)


#: What has no converter, or one that cannot take it, in terms of smaller operators.
SMALLER = [
    lambda x: functional.max_pool2d(x, 2, return_indices=True),
    lambda x: torch.native_layer_norm(x, (9,), None, None, 1e-5)[1],
    lambda x: functional.normalize(x, p=3.0),
    lambda x: torch.ldexp(x, torch.tensor(2)),
]

FUNCTIONS = [
    lambda x: torch.var_mean(x, 1, correction=0),
    lambda x: torch.std_mean(x, (0, 2), keepdim=True),
    lambda x: torch.prod(x, 2),
    lambda x: torch.exp2(x) + torch.hypot(x, 2 * x),
    lambda x: torch.copysign(x, -x) + torch.copysign(x, torch.tensor(-0.0)),
    lambda x: torch.fmax(torch.where(x > 0.5, float("nan"), x), x - 1),
    lambda x: torch.max(x, 2),
    lambda x: torch.min(x, 1, keepdim=True),
    lambda x: torch.sort(x, 2, descending=True),
    lambda x: torch.kthvalue(x, 3, 2),
    lambda x: torch.where(x > 0, x, 1),
    lambda x: x[0, 0].scatter_add(1, torch.tensor([[0, 2, 2]]), x[0, 0]),
    lambda x: x[0, 0].scatter_reduce(
        1, torch.tensor([[0, 2, 2]]), x[0, 0], "amax", include_self=False
    ),
    lambda x: functional.grid_sample(x, torch.tanh(x[:, :, :2, :4]).permute(0, 2, 3, 1)),
    lambda x: functional.adaptive_max_pool2d(x, (7, 3)),
]


def test_smaller_operators(agrees):
    agrees(SMALLER, image(1, 2, 8, 9), rtol=1e-4, atol=1e-5)


def test_functions(agrees):
    agrees(FUNCTIONS, image(1, 2, 7, 9), rtol=1e-4, atol=1e-5, compiled=True)


SPECIAL_SIZES = [
    lambda x: torch.argmax(x.sum()) + x.sum().softmax(0),
    lambda x: x.sum() * torch.arange(3),
    lambda x: x[:, :0].sum(1) + x.sum(),
    lambda x: x[:, :0].mean(1) + x.sum(),
    lambda x: torch.var(x[:0], 0) + x.sum(),
    lambda x: x.sum().sort()[0] + x.mean(),
]


def test_tensors_without_elements_and_of_rank_0(agrees):
    agrees(SPECIAL_SIZES, image(3, 4), compiled=True)


def test_places_of_infinities_and_nan(agrees):
    """TVM's search starts at place -1 with the least finite number, and compares NaN as any other."""
    x = torch.tensor([[-np.inf] * 3, [np.inf] * 3, [0.0, np.nan, 1.0], [np.nan, np.inf, np.nan]])
    agrees([lambda x: torch.argmax(x, 1), lambda x: torch.argmin(x, 1)], x, compiled=True)
    agrees(
        [
            torch.log1p,
            lambda x: 0.0 * x,
            lambda x: functional.relu(x),
            lambda x: x.amax(1),
            lambda x: x.amin(1),
        ],
        x,
        compiled=True,
    )


ORDER = [
    lambda x: x.sort(1)[0],
    lambda x: x.sort(1, descending=True)[0],
    lambda x: x.topk(2, 1)[0],
    lambda x: x.topk(2, 1, largest=False)[0],
    lambda x: x.kthvalue(3, 1)[0],
    lambda x: x.median(1)[0],
    lambda x: x.median(),
    lambda x: x[1:2].median(),
    lambda x: torch.cummax(x, 1),
    lambda x: torch.cummin(x, 0),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_order_of_nan(agrees, dtype):
    """NaN is above all numbers; bfloat16 is sorted in float32 (TVM takes its bits for another type)."""
    rows = [[1, np.nan, -2, 5], [3, -1, 2, 2], [-np.inf, 0, -3, -1], [np.nan, -np.inf, 7, np.nan]]
    x = torch.tensor(rows).to(dtype)
    functions = [lambda x, f=f: _widened(f(x)) for f in ORDER]
    if dtype == torch.bfloat16:
        functions = [lambda x, f=f: f(x.to(torch.bfloat16)) for f in functions]
        x = x.float()
    agrees(functions, x, compiled=True)


def _widened(values):
    """Results that numpy has a type for."""
    values = values if isinstance(values, tuple) else (values,)
    return tuple(v.float() if v.dtype == torch.bfloat16 else v for v in values)


def test_complementary_error_function(agrees):
    """Its relative error is small where ``1 - erf(x)`` has lost all digits."""
    x = torch.linspace(-4, 9, 64)
    agrees([torch.erfc], x, rtol=2e-5, atol=1e-38)
    x = x.half()
    agrees([torch.erfc], x, rtol=2e-3, atol=1e-7)


VIEWS = [
    lambda x: torch.as_strided(x, (3, 4), (4, 1), 2),
    lambda x: torch.as_strided(x, (2, 5), (1, 2)),
    lambda x: x.unfold(1, 3, 2),
    lambda x: x.unfold(0, 2, 1),
    lambda x: torch.roll(x, (1, -2), (0, 1)),
    lambda x: x[:, -1] + x[0, 0],
    lambda x: x[torch.tensor([-1, 0])],
    lambda x: x[torch.tensor([-1, 0]), torch.tensor([-2, 1])],
    lambda x: x[:, torch.tensor([[-1, 0], [2, -3]])],
    lambda x: x.view(2, 2, 3, 2)[:, torch.tensor([[0], [-1]]), torch.tensor([2, 0, 1])],
    lambda x: x.view(2, 2, 3, 2)[torch.tensor([0, 1]), :, torch.tensor([-1, 0])],
    lambda x: functional.unfold(x[None, None], 2, stride=2),
    lambda x: torch.cat([torch.empty(0), x, torch.empty(4, 0)], 1),
    lambda x: torch.cat([x, x.to(torch.int32)]),
    lambda x: x.sum().cumsum(0) + x.cumsum(-1),
]


PRODUCTS = [
    lambda x, y: torch.addmm(x, y, y, alpha=0.5, beta=2),
    lambda x, y: torch.addmm(x * float("nan"), y, y, beta=0),
    lambda x, y: torch.addmv(x[0], y, x[1], alpha=-1),
    lambda x, y: torch.addbmm(x, y[None].expand(2, 3, 3), x[None].expand(2, 3, 3)),
    lambda x, y: torch.baddbmm(x[None], y[None], x[None], beta=0.5),
]


def test_products(agrees):
    agrees(PRODUCTS, image(3, 3), image(3, 3) + 1)


def test_views(agrees):
    agrees(VIEWS, image(4, 6))


def _assigned(x, key, value):
    x = x.clone()
    x[key] = value
    return x


TWO = torch.tensor([-1, 1])
SEVERAL = slice(None)
PUTS = [
    lambda x, v: x.index_put((TWO,), v[:2, :4, :5]),
    lambda x, v: x.index_put((torch.tensor([0, 0, -3]),), v[0, 0, :5], accumulate=True),
    lambda x, v: _assigned(x, (SEVERAL, TWO), v[:3, :2, :5]),
    lambda x, v: _assigned(x, (SEVERAL, TWO), 2.5),
    lambda x, v: _assigned(x, (SEVERAL, SEVERAL, TWO), v[:3, :4, 0:1]),
    lambda x, v: _assigned(x, (SEVERAL, torch.tensor([[0], [-1]]), TWO), v[:3, :2, :2]),
    lambda x, v: _assigned(x, (TWO, SEVERAL, torch.tensor([3, -4])), v[:2, :4, 0]),
    lambda x, v: _assigned(x, (TWO, TWO, TWO), v[0, 0, :2]),
    lambda x, v: _assigned(x, x < 0, 0.5),
    lambda x, v: _assigned(x, x[:, :, 0] < 0, v[0, 0, 0]),
    lambda x, v: _assigned(x > 0, (SEVERAL, 1), v[0, 0, :5] > 0),
    lambda x, v: torch.index_add(x, 1, torch.tensor([2, 2]), v[:3, :2, :5]),
    lambda x, v: torch.index_copy(x, -1, TWO + 1, v[:3, :4, :2]),
    lambda x, v: torch.index_fill(x, 0, TWO + 1, 3.0),
    lambda x, v: functional.fold(v.reshape(1, 12, 20)[:, :, :6], (3, 4), 2),
]


def test_puts(agrees):
    """TVM's converter wants an index for each axis, and broadcasts those of unlike ranks wrongly."""
    agrees(PUTS, image(3, 4, 5), image(4, 6, 10), compiled=True)


DIVISIONS = [
    lambda x, y: x // y,
    lambda x, y: x % y,
    lambda x, y: torch.fmod(x, y),
    lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    lambda x, y: x // 0.1,
    lambda x, y: 7 % y,
    lambda x, y: torch.hypot(x, y),
    lambda x, y: x.long() // 3 + x.long() % 5,
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_divisions(agrees, dtype):
    """A quotient that rounds to a whole number is not its floor: 1.0 // 0.1 is 9."""
    values = [1.0, 2, 0.3, 0.6, -0.9, 5, 0, -7.3, 3e4, 0.1, -0.1, 0.2]
    x = torch.tensor(values, dtype=dtype).repeat(len(values))
    y = torch.tensor(values, dtype=dtype).repeat_interleave(len(values))
    agrees(DIVISIONS, x, y, compiled=True, rtol=1e-3 if dtype is torch.float16 else 1e-5)
    special = torch.tensor([np.inf, -np.inf, np.nan, 1.0, -2.0, 0.0], dtype=dtype)
    agrees(
        [*DIVISIONS[:4], torch.hypot],
        special.repeat(6),
        special.repeat_interleave(6),
        compiled=True,
    )


NORMS = [
    lambda x: functional.layer_norm(x, (5, 6)),
    lambda x: functional.layer_norm(x, (6,), x[0, 0, 0], x[0, 1, 0]),
    lambda x: functional.group_norm(x, 2, x[0, :, 0, 0]),
    lambda x: functional.instance_norm(x),
    lambda x: functional.rms_norm(x, (6,), x[0, 0, 0]),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norms(agrees, dtype):
    """TVM has no norms of float64."""
    agrees(NORMS, image(2, 4, 5, 6).to(dtype), compiled=True, rtol=1e-4, atol=1e-5)


POWERS = [
    lambda x, n: x**2 + x**3.0 + x.abs() ** 0.5,
    lambda x, n: (n**2, n**3, n**0, 2 ** n.abs(), 1.5**n),
    lambda x, n: (torch.pow(n, 2.0), n**-1.5, x**n, n.abs() ** x),
]


def test_powers(agrees):
    """Of an integer and a fraction PyTorch takes floats."""
    agrees(POWERS, image(4), torch.tensor([1, 3, 2, 5]), compiled=True)


SHIFTS = [
    lambda n, m: (n << 2, n >> 1, n << m, n >> m),
    lambda n, m: (n >> 40, n << 40, torch.bitwise_left_shift(n, m + 40)),
    lambda n, m: (n.to(torch.uint8) >> 3, n.to(torch.int8) << 9),
]


def test_shifts(agrees):
    """LLVM leaves shifts by as many bits as there are undefined."""
    counts = torch.tensor([0, 1, 31, 32, 33, -1], dtype=torch.int32)
    agrees(SHIFTS, torch.tensor([-7, 5, -1, -9, 3, 8], dtype=torch.int32), counts, compiled=True)


def test_transposed_convolutions(agrees):
    functions = [
        lambda x, w, b: functional.conv_transpose1d(x[:, :, 0, 0], w[:, :, 0, 0], b, 3, 1, 2, 2),
        lambda x, w, b: functional.conv_transpose2d(x[:, :, 0], w[:, :, 0], b, 2, 1, 1, 2, 2),
        lambda x, w, b: functional.conv_transpose3d(x, w, b, (2, 1, 2), 1, (1, 0, 1), 2, (2, 1, 1)),
        lambda x, w, b: functional.conv_transpose3d(x[0], w),
    ]
    inputs = image(1, 4, 3, 4, 4), image(4, 2, 2, 3, 3), image(4)
    agrees(functions, *inputs, rtol=1e-4, atol=1e-5, compiled=True)


@pytest.mark.parametrize("number", [None, 3, 2.5])
def test_results_that_are_no_tensors_are_named(number):
    program = torch.export.export(Calls(lambda x: x + 1, lambda x: number), (image(2),))
    with pytest.raises(UnsupportedOperatorError, match=f"output 1 of the program is {number}, not"):
        frontend.load(program)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: _assigned(x, x > 0, x[x > 0]), "truth values"),
        (lambda x: x + torch.rand_like(x), "random numbers"),
        (lambda x: functional.dropout(x, 0.5, training=True), "random numbers"),
        (lambda x: functional.adaptive_max_pool2d(x, 3), "windows of one size"),
    ],
)
def test_what_would_be_silently_wrong_is_refused(function, reason):
    program = torch.export.export(Calls(function), (image(1, 2, 4, 4),))
    with pytest.raises(UnsupportedOperatorError, match=rf"(?s)operator .*node.*{reason}"):
        frontend.load(program)


def test_a_program_in_training_mode_is_refused():
    net = torch.nn.Sequential(torch.nn.Conv2d(2, 2, 1), torch.nn.BatchNorm2d(2)).train()
    with pytest.raises(
        UnsupportedOperatorError, match=r"changes its buffer '1\..*module\.eval\(\)"
    ):
        frontend.load(torch.export.export(net, (image(1, 2, 4, 4),)))


def test_a_view_after_attention(agrees):
    """Decomposed attention has other strides than the CPU's kernel: torch itself then fails to decompose the view."""

    def attend(x):
        heads = x.view(2, 5, 2, 4).transpose(1, 2)
        result = functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return result.transpose(1, 2).view(-1, 8)

    agrees([attend], image(2, 5, 8))
