"""Runs ``inside`` in the environment whose TVM has Relay, and compares its plans with those made here.

The plan that the Relay passes make equals the plan of the same module brought to Relax: the same
groups, for the same reasons.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

import tvm_fusion as tf
from tvm_fusion.errors import InvalidModelError
from tvm_fusion.testing import relay_environment
from tvm_fusion.testing.plan_digest import plan_digest
from tvm_fusion.transform.fuse import graph_of

pytestmark = [pytest.mark.slow, pytest.mark.relay]

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent

NETWORKS = ("bert", "resnet-50", "mobilenet", "inception-v3", "squeezenet", "densenet")


def check(folder: Path, name: str) -> int:
    """Compare the plans of one module; return how many groups they have together."""
    mod = tf.frontend.relay.load(folder / f"{name}.json")
    groups = 0
    for wanted in json.loads((folder / f"{name}.plans").read_text(encoding="utf-8")):
        config = tf.FusionConfig(**wanted["config"])
        plan = tf.plan(mod, wanted["target"], config)
        graph = graph_of(mod, plan.float32_products)
        found: dict[str, Any] = json.loads(json.dumps(plan_digest(plan, graph)))
        for key, value in wanted["digest"].items():
            assert found[key] == value, (name, wanted["target"], key)
        groups += len(plan.groups)
    return groups


def test_cases(tmp_path) -> None:
    command = [relay_environment.python_of(), "-m", "tvm_fusion.testing.relay_plans", tmp_path]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    names = sorted(file.stem for file in tmp_path.glob("*.json"))
    assert len(names) > 35
    groups = {name: check(tmp_path, name) for name in names}
    assert sum(groups.values()) > 2 * len(names)


#: Operators whose plan differs, and why: the importer writes what Relax lacks by operators that it has.
OTHERWISE = {
    "annotation.stop_fusion": "it ends a group in Relay, and is nothing in Relax",
    "gather_nd": "Relax has the positions in the last axis, as int64",
    "one_hot": "Relax takes int64",
    "nn.mirror_pad": "by its mode SYMMETRIC, which is slices, reversed and joined",
}


def test_operators(tmp_path) -> None:
    """Each operator that is imported, alone: both paths see the same operator, or are known not to."""
    command = [relay_environment.python_of(), HERE / "operator_plans.py", tmp_path]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    files = sorted(tmp_path.glob("*.json"))
    assert len(files) > 200
    differ = set()
    for file in files:
        try:
            check(tmp_path, file.stem)
        except AssertionError:
            differ.add(file.stem.partition("-")[0])
        except InvalidModelError as error:
            assert "every output is a constant" in str(error)
    assert differ == set(OTHERWISE)


@pytest.mark.parametrize("name", NETWORKS)
def test_network(name: str, tmp_path) -> None:
    """The network in Relay (``inside/test_models.py``), then its plans here."""
    run_inside("test_models.py", f"test_network and {name}", TVM_FUSION_RELAY_PLANS=str(tmp_path))
    assert check(tmp_path, name) > 20


@pytest.mark.parametrize(
    ("file", "part"),
    [
        ("test_annotation.py", ""),
        ("test_bad_input.py", ""),
        ("test_rewrites.py", ""),
        ("test_models.py", "page"),
        ("test_models.py", "sequential"),
    ],
)
def test_inside(file: str, part: str) -> None:
    run_inside(file, part)


def run_inside(file: str, part: str, **variables: str) -> None:
    """Run tests of ``inside`` where TVM has Relay."""
    python = str(relay_environment.python_of())
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "inside" / file)]
    command += ["-k", part] if part else []
    environment = {**os.environ, **variables}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout.splitlines()[-1]
