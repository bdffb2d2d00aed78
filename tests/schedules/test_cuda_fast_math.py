"""Fast forms of costly functions: their errors over the whole range, and where they are used."""

from __future__ import annotations

import ctypes
import math
import subprocess

import numpy as np
import pytest
from tvm import relax
from tvm_fusion.schedules.cuda import exact_math
from tvm_fusion.schedules.cuda.fast_math import SOURCES, fast_math

from tvm_fusion.compat import tirx

op = relax.op

#: The relative error of ``ex2.approx.ftz.f32`` and ``rcp.approx.ftz.f32`` (PTX ISA 9.0), which a CPU does not have.
INSTRUCTION = 2.0**-22


#: What the sources use of CUDA.
HEAD = """
#include <cmath>
#include <cstring>
#define __device__
#define __forceinline__ static inline
static inline int __float_as_int(float x) { int y; std::memcpy(&y, &x, 4); return y; }
static inline float __int_as_float(int x) { float y; std::memcpy(&y, &x, 4); return y; }
"""


@pytest.fixture(scope="module")
def device_functions(tmp_path_factory):
    """Our device functions, compiled for the CPU, on arrays."""
    folder = tmp_path_factory.mktemp("fast_math")
    sources = SOURCES | {f"exact_{name}": text for name, text in exact_math.SOURCES.items()}
    loops = "".join(
        f'extern "C" void run_{name}(const float* x, float* y, int n) {{\n'
        f"  for (int i = 0; i < n; ++i) y[i] = tvmf_{name}(x[i]{', y[i]' if name == 'exact_pow' else ''});\n}}\n"
        for name in sources
    )
    (folder / "f.cc").write_text(HEAD + "".join(sources.values()) + loops)
    command = ["g++", "-O1", "-shared", "-fPIC", "-ffp-contract=off", "-o", "f.so", "f.cc"]
    subprocess.run(command, cwd=folder, check=True)
    library = ctypes.CDLL(str(folder / "f.so"))

    def run(name: str, x: np.ndarray, y: np.ndarray | None = None) -> np.ndarray:
        x = np.ascontiguousarray(x, "float32")
        y = np.empty_like(x) if y is None else np.array(y, "float32")
        pointers = [ctypes.c_void_p(a.ctypes.data) for a in (x, y)]
        getattr(library, f"run_{name}")(*pointers, ctypes.c_int(x.size))
        return y.astype("float64")

    return run


def everywhere() -> np.ndarray:
    """Numbers of both signs and all magnitudes, dense where the functions bend."""
    sizes = np.geomspace(1e-30, 1e30, 200001)
    return np.concatenate([np.linspace(-12, 12, 2000001), sizes, -sizes]).astype("float32")


def exact(function, x: np.ndarray) -> np.ndarray:
    """A function of the standard library in float64."""
    return np.array([function(v) for v in x.astype("float64")])


@pytest.mark.parametrize(("name", "bound"), [("gelu", 3.1e-7), ("gelu_long", 1.3e-7)])
def test_gelu(device_functions, name, bound):
    x = everywhere()[::7]
    x64 = x.astype("float64")
    expected = x64 * 0.5 * exact(lambda v: math.erfc(-v / math.sqrt(2)), x)
    error = np.abs(device_functions(name, x) - expected)
    # The error of the distribution function, which the exact product is to be off by, with the rounding of the result.
    assert (error <= np.abs(x64) * (bound + INSTRUCTION / 2)).all()


def test_erf(device_functions):
    x = everywhere()[::7]
    assert np.abs(device_functions("erf", x) - exact(math.erf, x)).max() <= 7e-7 + INSTRUCTION


def test_exp_and_sigmoid(device_functions):
    x = np.linspace(-80, 80, 1000001).astype("float32")
    expected = np.exp(x.astype("float64"))
    assert (np.abs(device_functions("exp", x) / expected - 1) <= 9e-8 * np.abs(x) + 2e-7).all()
    expected = 1 / (1 + np.exp(-x.astype("float64")))
    assert (np.abs(device_functions("sigmoid", x) / expected - 1) <= 9e-8 * np.abs(x) + 4e-7).all()


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("gelu", math.nan, math.inf),
        ("gelu_long", math.nan, math.inf),
        ("erf", -1.0, 1.0),
        ("sigmoid", 0.0, 1.0),
        ("exp", 0.0, math.inf),
    ],
)
def test_infinity_and_nan(device_functions, name, low, high):
    found = device_functions(name, np.array([-math.inf, math.inf, math.nan]))
    if name.startswith("gelu"):
        low = 0.0  # the limit, where x * (1 + erf(x / sqrt(2))) / 2 has no value
        found[0] = 0.0 if math.isnan(found[0]) else found[0]
    np.testing.assert_array_equal(found, [low, high, math.nan])


def gelu_like(argument: float, half: float = 0.5):
    """``x * (half + half * erf(y * argument))`` for float16 x and y, as legalized."""

    def make(x, y):
        number = lambda v: tirx.FloatImm("float16", v)  # noqa: E731
        inner = tirx.Cast("float16", tirx.erf(tirx.Cast("float32", y * number(argument))))
        return x * (number(half) + inner * number(half))

    return make


def test_gelu_is_recognised():
    x = tirx.Var("x", "float16")
    text = str(fast_math(gelu_like(math.sqrt(0.5))(x, x), narrow=True))
    assert "tvmf_gelu" in text
    assert "T.erf" not in text
    doubled = fast_math(gelu_like(math.sqrt(0.5), 1.0)(x, x), narrow=True)
    assert isinstance(doubled, tirx.Mul)
    assert float(doubled.b.value) == 2.0


@pytest.mark.parametrize(("argument", "same"), [(0.5, True), (math.sqrt(0.5), False)])
def test_what_looks_like_gelu_is_not(argument, same):
    x, y = tirx.Var("x", "float16"), tirx.Var("y", "float16")
    text = str(fast_math(gelu_like(argument)(x, x if same else y), narrow=True))
    assert "tvmf_gelu" not in text
    assert "tvmf_erf" in text


def test_float32_keeps_its_precision():
    x = tirx.Var("x", "float32")
    y = tirx.Var("y", "float32")
    for value in (tirx.exp(x), tirx.erf(x), x / y):
        assert "tvmf" not in str(fast_math(value, narrow=False))
    assert "tvmf" in str(fast_math(tirx.exp(x), narrow=True))


def test_quotients():
    x = tirx.Var("x", "float16")
    y = tirx.Var("y", "float16")
    by_constant = fast_math(x / tirx.FloatImm("float16", 768.0), narrow=False)
    assert isinstance(by_constant, tirx.Mul)
    assert "tvmf_reciprocal" in str(fast_math(x / y, narrow=True))
    z = tirx.Var("z", "bfloat16")
    # A bfloat16 may be beyond the range in which the reciprocal instruction is exact.
    assert isinstance(fast_math(z / z, narrow=True), tirx.Div)


def test_half_precision_is_widened():
    x = tirx.Var("x", "float16")
    value = fast_math(tirx.Cast("float16", tirx.sqrt(x + x)) * x, narrow=True)
    assert str(value.ty.dtype) == "float32"
    assert "float16" not in str(value).replace('T.Cast("float32", x)', "")


@pytest.mark.parametrize(("dtype", "function"), [("float16", "gelu"), ("float32", "gelu_long")])
def test_kernels_of_gelu_have_no_error_function(cuda, dtype, function):
    func = cuda.function(lambda e, x: e(op.nn.gelu(x)), (4, 96), dtype=dtype)
    source = cuda.check(func, "elementwise")
    assert f"tvmf_{function}(" in source
    assert "erf" not in source[source.index('extern "C" __global__') :]


def test_gelu_by_tanh_is_a_sigmoid_in_half_precision(cuda):
    make = lambda e, x: e(op.nn.gelu_tanh(x))  # noqa: E731
    assert "tvmf_sigmoid(" in cuda.check(
        cuda.function(make, (4, 96), dtype="float16"), "elementwise"
    )
    assert "tvmf_reciprocal(" in cuda.check(cuda.function(make, (4, 96)), "elementwise")


def test_exact_tanh(device_functions):
    x = everywhere()[::3]
    expected = np.tanh(x.astype("float64"))
    assert (np.abs(device_functions("exact_tanh", x) - expected) <= 4e-7 * np.abs(expected)).all()
    found = device_functions("exact_tanh", np.array([-math.inf, math.inf, math.nan, 0.0]))
    np.testing.assert_array_equal(found, [-1, 1, math.nan, 0])


@pytest.mark.parametrize("name", ["sin", "cos"])
def test_exact_sines_of_many_turns(device_functions, name):
    x = np.concatenate([np.linspace(-10, 10, 100001), np.linspace(-1e5, 1e5, 100001)])
    x = x.astype("float32")
    expected = getattr(np, name)(x.astype("float64"))
    assert np.abs(device_functions(f"exact_{name}", x) - expected).max() <= 5e-7


def test_exact_pow(device_functions):
    rng = np.random.default_rng(0)
    x = np.exp(rng.uniform(-20, 20, 300000)).astype("float32")
    y = rng.uniform(-4, 4, 300000).astype("float32")
    expected = np.power(x.astype("float64"), y.astype("float64"))
    error = np.abs(device_functions("exact_pow", x, y) / expected - 1)
    assert (error <= 3e-7 * (1 + np.abs(y))).all()
    whole = np.rint(y)
    expected = np.power(-x.astype("float64"), whole.astype("float64"))
    error = np.abs(device_functions("exact_pow", -x, whole) / expected - 1)
    assert (error <= 3e-7 * (1 + np.abs(whole))).all()


def test_exact_pow_at_its_ends(device_functions):
    """As C's ``powf``."""
    ends = [0.0, -2.0, -8.0, 1.0, 2.0, 3.0, 1e30, 1e-30, math.inf, math.nan, 5.0]
    powers = [0.0, -1.0, 0.0, 0.5, 3.0, -2.0, 1.5, 127.0, 2.0, 2.5, -300.0]
    x, y = (np.array(a, "float32").ravel() for a in np.meshgrid(ends, powers))
    with np.errstate(all="ignore"):
        expected = np.power(x, y).astype("float64")
    np.testing.assert_allclose(device_functions("exact_pow", x, y), expected, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", ["power", "tanh", "sin", "cos", "tan"])
def test_kernels_hold_what_their_types_promise(cuda, name, dtype):
    """With the fast forms powers of negative numbers are NaN, and float32 has the digits of float16."""
    make = (lambda e, x, y: e(op.power(x, op.floor(y)))) if name == "power" else None
    make = make or (lambda e, x: e(getattr(op, name)(x)))
    shapes = [(4, 96)] * (2 if name == "power" else 1)
    source = cuda.check(cuda.function(make, *shapes, dtype=dtype), "elementwise")
    assert f"tvmf_exact_{'pow' if name == 'power' else name}(" in source
