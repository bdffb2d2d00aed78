"""Whole networks, made by a TVM that has Relay: numbers, times, and the fusion passes' annotations.

They need the environment of ``make relay-env``.
"""

from __future__ import annotations

import re
import subprocess
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

from tvm_fusion.frontend import relay

relay_environment = pytest.importorskip("tvm_fusion.testing.relay_environment")

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent

NETWORKS = (
    "mobilenet_v2", "bert", "mlp", "dqn", "dcgan", "lstm", "squeezenet", "mobilenet", "resnet", "vgg+params",
    "densenet", "inception_v3", "resnet_3d",
)  # fmt: skip

#: Networks that the passes of tvm_fusion.relay annotate (tvm_fusion.testing.relay_models), with the fewest groups.
ANNOTATED = {"bert": 16, "squeezenet": 18}


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
            scale = float(np.abs(want).max())
            np.testing.assert_allclose(got / scale, want / scale, rtol=0, atol=1e-4)
    if name == "resnet":
        assert seconds < 5


@pytest.mark.nvcc
@pytest.mark.parametrize("name", ANNOTATED)
def test_annotated_by_the_relay_passes(python, tmp_path, run_module, name):
    """Groups that tvm_fusion.relay makes are kept, are what is planned here, and become one kernel each."""
    import tvm_fusion as tf
    from tvm_fusion.transform import StripFusion

    script = tmp_path / "annotate.py"
    script.write_text(ANNOTATE)
    call([python, str(script), str(tmp_path / "model.json"), name])
    mod = relay.load(tmp_path / "model.json")
    plain = StripFusion()(mod)
    groups = [gvar for gvar in mod.get_global_vars() if gvar.name_hint != "main"]
    assert len(groups) >= ANNOTATED[name]
    target = "cuda:sm_90a"
    kept, own = tf.plan(mod, target), tf.plan(plain, target)
    assert sorted(g.nodes for g in kept.groups) == sorted(g.nodes for g in own.groups)
    with np.load(tmp_path / "model.npz") as arrays:
        results = run_module(plain, *[arrays[p.name] for p in plain["main"].params])
        for i, got in enumerate(results):
            want = arrays[f"out_{i}"]
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * float(np.abs(want).max()))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # a group that is left unfused is one
        model = tf.compile(mod, target)
    assert len(model.plan.groups) == len(groups)


#: Run in the environment with Relay: annotate a network with all four passes and save it.
ANNOTATE = """
import sys
import numpy as np
import tvm
import tvm_fusion.relay as fusion
from tvm_fusion.testing.relay_models import bert, inputs_of, network, run_graph, simplified

path, name = sys.argv[1:]
before = simplified(bert() if name == "bert" else network(name, 64))
passes = (fusion.VerticalFusion, fusion.HorizontalFusion, fusion.CrossFusion, fusion.CompoundFusion)
mod = tvm.transform.Sequential([make(target="cuda:sm_90a") for make in passes])(before)
with open(path, "w") as file:
    file.write(tvm.ir.save_json(mod))
inputs = inputs_of(before)
names = [param.name_hint for param in before["main"].params]
values = dict(inputs) if isinstance(inputs, dict) else dict(zip(names, inputs))
arrays = {"out_%d" % i: value for i, value in enumerate(run_graph(before, inputs))}
arrays.update({key: value.numpy() if hasattr(value, "numpy") else value for key, value in values.items()})
np.savez(path.replace(".json", ".npz"), **arrays)
"""


def test_the_page_saves_what_is_read(python, tmp_path):
    """The script that docs/relay-models.md gives for the old TVM."""
    page = (HERE.parents[2] / "docs" / "relay-models.md").read_text(encoding="utf-8")
    code = re.search(r"## 1\..*?```python\n(.*?)```", page, re.DOTALL)[1]
    model = "from tvm.relay import testing\nmod, params = testing.mlp.get_workload(1)\n"
    call([python, "-c", code.replace("# mod, params", f"{model}# mod, params")], cwd=tmp_path)
    mod = relay.load(tmp_path / "model.json", params=tmp_path / "model.params")
    assert [p.name for p in mod["main"].params] == ["data"]
