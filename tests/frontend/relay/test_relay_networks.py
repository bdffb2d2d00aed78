"""Whole networks, made by a TVM that has Relay: numbers, times, and the fusion passes' annotations.

They need the environment of ``make relay-env``.
"""

from __future__ import annotations

import subprocess
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

from tvm_fusion.frontend import relay
from tvm_fusion.testing.relay_fixtures import read_arrays, read_document

relay_environment = pytest.importorskip("tvm_fusion.testing.relay_environment")

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent

NETWORKS = (
    "mobilenet_v2", "bert", "mlp", "dqn", "dcgan", "lstm", "squeezenet", "mobilenet", "resnet", "vgg+params",
    "densenet", "inception_v3", "resnet_3d", "synthetic", "forms",
)  # fmt: skip

#: Networks that the passes of tvm_fusion.relay annotate (tvm_fusion.testing.relay_models), with the fewest groups.
ANNOTATED = {"bert": 10, "squeezenet": 18}


@pytest.fixture(scope="module")
def python():
    """The interpreter of the environment; a skip that says why there is none."""
    found = relay_environment.python_of()
    if found is None:
        pytest.skip(f"relay: {relay_environment.missing()}")
    return str(found)


def call(command, **options):
    """Run a command; show the end of what it wrote if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture
def made(python, tmp_path):
    """A function that makes a network and returns its files, without suffix."""

    def make(name):
        call([python, str(HERE / "relay_models.py"), str(tmp_path), name])
        return tmp_path / name.replace("+params", "_apart")

    return make


@pytest.mark.parametrize("name", NETWORKS)
def test_matches_relay(made, run_module, name):
    files = made(name)
    params = files.with_suffix(".params")
    start = time.process_time()
    mod = relay.load(files.with_suffix(".json"), params=params if params.exists() else None)
    seconds = time.process_time() - start
    with np.load(files.with_suffix(".npz")) as arrays:
        inputs = {key.removeprefix("in_"): arrays[key] for key in arrays.files}
        names = [p.name for p in mod["main"].params]
        results = run_module(mod, *[inputs.get(n, inputs.get(n.rpartition("_")[0])) for n in names])
        for i, got in enumerate(results):
            want = arrays[f"out_{i}"]
            scale = max(float(np.abs(want).max()), 1e-6)
            np.testing.assert_allclose(got / scale, want / scale, rtol=0, atol=1e-4)
    if name == "resnet":
        assert seconds < 5


STORED = sorted(
    path.name.removesuffix(".npz") for path in (HERE / "data" / "networks").glob("*.npz")
)


@pytest.mark.parametrize("name", STORED)
def test_stored_network(name):
    """What tests/gpu/test_relay_on_gpu.py runs on a GPU, on the CPU: needs no Relay."""
    import tvm_fusion as tf
    from tvm_fusion.transform import StripFusion

    folder = HERE / "data" / "networks"
    mod = relay.from_document(read_document(folder / f"{name}_annotated_16.json.gz"))
    inputs, expected = read_arrays(folder / f"{name}.npz")
    for form in (mod, StripFusion()(mod)):
        results = tf.compile(form, "llvm", verify=False)(*inputs.values())
        for got, want in zip(results, expected, strict=True):
            scale = float(np.abs(want).max())
            np.testing.assert_allclose(got / scale, want / scale, rtol=0, atol=1e-4)


def working(plan):
    """The operators of each group without reshapes: an annotation keeps those of the model at its ends."""
    return sorted([n for n in group.nodes if not n.startswith("reshape")] for group in plan.groups)


@pytest.mark.nvcc
@pytest.mark.parametrize("name", ANNOTATED)
def test_annotated_by_the_relay_passes(python, tmp_path, run_module, name):
    """Groups that tvm_fusion.relay makes are kept, are what is planned here, and become one kernel each."""
    import tvm_fusion as tf
    from tvm_fusion.transform import StripFusion

    call([python, str(HERE / "annotate_network.py"), str(tmp_path), name], cwd=HERE.parents[2])
    mod = relay.load(tmp_path / f"{name}.json")
    plain = StripFusion()(mod)
    groups = [gvar for gvar in mod.get_global_vars() if gvar.name_hint != "main"]
    assert len(groups) >= ANNOTATED[name]
    target = "cuda:sm_90a"
    kept, own = tf.plan(mod, target), tf.plan(plain, target)
    assert working(kept) == working(own)
    inputs, expected = read_arrays(tmp_path / f"{name}.npz")
    for got, want in zip(run_module(plain, *inputs.values()), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * float(np.abs(want).max()))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # a group that is left unfused is one
        model = tf.compile(mod, target)
    assert len(model.plan.groups) == len(groups)
