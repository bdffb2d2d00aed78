"""A small model, and a runner whose GPU is this machine's CPU behind a fake driver."""

from __future__ import annotations

import numpy as np
import pytest

import tvm_fusion as tf
from tvm_fusion.build.graph_runner import GraphRunner
from tvm_fusion.compat import tvm
from tvm_fusion.testing.fake_driver import FakeDriver
from tvm_fusion.testing.modules import ModuleBuilder

SHAPE = (1, 8, 9, 9)


def small(dtype="float32"):
    b = ModuleBuilder(dtype=dtype)
    x = b.input("x", SHAPE)
    y = b.relu("r1", b.bias("b1", b.conv("c1", x, 8)))
    return b.finish(b.relu("r2", b.add("add", b.bias("b2", b.conv("c2", y, 8)), x)))


@pytest.fixture(scope="session")
def model():
    return tf.compile(small(), "llvm", verify=False)


@pytest.fixture(scope="session")
def residual():
    """Makes the module of `model`, of any dtype."""
    return small


@pytest.fixture(scope="session")
def owned():
    """Whether a compiled model itself holds the kernel of a name."""
    return lambda compiled: lambda name: compiled._library.mod.implements_function(name, True)


@pytest.fixture(scope="session")
def runner_of(owned):
    """The runner of a GPU, with the CPU's memory for the GPU's."""

    def make(compiled, driver=None):
        return GraphRunner(
            lambda: compiled._vm(tvm.cpu()), compiled.signature, "main", tvm.cpu(),
            driver or FakeDriver(), owned(compiled),
        )  # fmt: skip

    return make


@pytest.fixture
def driver():
    return FakeDriver()


@pytest.fixture
def runner(model, driver, runner_of):
    made = runner_of(model, driver)
    driver.calls.clear()
    return made


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


@pytest.fixture(scope="session")
def values():
    """Normal values for the small model, or of another shape."""

    def make(seed=0, shape=SHAPE, dtype="float32"):
        return np.random.default_rng(seed).standard_normal(shape).astype(dtype)

    return make
