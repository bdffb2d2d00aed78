"""Relay modules on a GPU: the numbers that Relay itself computed, which are stored beside them.

Needs no Relay: modules, inputs and results are files of the repository (the weights of whole networks
are made again, see tvm_fusion.testing.relay_fixtures).
"""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest

import tvm_fusion as tf
from tvm_fusion.compat import structural_equal
from tvm_fusion.frontend import relay
from tvm_fusion.testing.relay_fixtures import read_arrays, read_document
from tvm_fusion.transform import StripFusion

pytestmark = pytest.mark.gpu

DATA = Path(__file__).parents[1] / "frontend" / "relay" / "data"
MODELS = sorted({path.name.rpartition("_")[0] for path in DATA.glob("*_16.json.gz")})
NETWORKS = sorted(path.name.removesuffix(".npz") for path in (DATA / "networks").glob("*.npz"))


def check(mod, file: Path) -> tf.Plan:
    """Compile a module for this GPU, run it, and compare with Relay's results."""
    inputs, expected = read_arrays(file)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # a group that is left unfused is one
        compiled = tf.compile(mod, "cuda", verify=False)
    # relay.testing's LSTM has an input "data" for each step; they become data, data_1, ...
    names = [param.name for param in mod["main"].params]
    results = compiled(*[inputs.get(n, inputs.get(n.rpartition("_")[0])) for n in names])
    for number, (got, want) in enumerate(zip(results, expected, strict=True)):
        assert got.dtype == want.dtype
        scale = max(float(np.abs(want.astype("float64")).max()), 1e-6)
        np.testing.assert_allclose(
            got / scale, want / scale, rtol=0, atol=1e-4, err_msg=f"output {number}"
        )
    return compiled.plan


@pytest.mark.parametrize("name", MODELS)
def test_fixture(name):
    """What three versions of TVM saved is one module here, so that one is compiled and run."""
    mod, *others = (
        relay.from_document(read_document(DATA / f"{name}_{version}.json.gz"))
        for version in ("16", "08", "09")
    )
    assert all(structural_equal(mod, other) for other in others)
    plan = check(mod, DATA / f"{name}.npz")
    if name == "annotated":
        assert len(plan.groups) == 3
        check(StripFusion()(mod), DATA / f"{name}.npz")


@pytest.mark.parametrize("form", ["annotated", "plain"])
@pytest.mark.parametrize("name", NETWORKS)
def test_network(name, form):
    mod = relay.from_document(read_document(DATA / "networks" / f"{name}_annotated_16.json.gz"))
    file = DATA / "networks" / f"{name}.npz"
    if form == "annotated":
        assert len(check(mod, file).groups) == len(mod.get_global_vars()) - 1
    else:
        assert check(StripFusion()(mod), file).groups
