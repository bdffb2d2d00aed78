"""Damaged Relay modules, read in a child process: an error of ours or a success, never a crash."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import tvm

from tvm_fusion.errors import InvalidModelError
from tvm_fusion.frontend.relay.arrays import parse_params

HERE = Path(__file__).parent


def outcomes(seed, count, files):
    """Read mutants in a child and count what became of them; fail when the child dies."""
    command = [
        sys.executable,
        str(HERE / "mutate_relay.py"),
        str(seed),
        str(count),
        *map(str, files),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, f"{lines[-1:]}: {done.stderr[-3000:]}"
    found = Counter(line.removeprefix("=> ") for line in lines if line.startswith("=> "))
    assert sum(found.values()) == count
    return found


def test_mutants():
    files = [
        HERE / "data" / f"{name}_16.json.gz"
        for name in ("annotated", "control", "products", "norms")
    ]
    found = outcomes(1, 150, files)
    assert found["InvalidModelError"] > 50
    assert found["ok"] > 5  # not everything that is changed matters


@pytest.mark.slow
@pytest.mark.parametrize("version", ["08", "09", "16"])
def test_many_mutants(version):
    outcomes(int(version), 2000, sorted((HERE / "data").glob(f"*_{version}.json.gz")))


def test_damaged_parameters():
    arrays = {"a": np.arange(6, dtype="float32").reshape(2, 3), "b": np.arange(3)}
    data = bytes(tvm.runtime.save_param_dict({k: tvm.runtime.tensor(v) for k, v in arrays.items()}))
    assert set(parse_params(data)) == {"a", "b"}
    chance, refused = random.Random(4), 0
    for _ in range(2000):
        changed = bytearray(data)
        for _ in range(chance.choice((1, 2, 5))):
            changed[chance.randrange(len(changed))] = chance.choice((0, 1, 127, 255))
        try:
            parse_params(
                bytes(changed[: chance.choice((len(changed), chance.randrange(len(changed))))])
            )
        except InvalidModelError as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused > 1000
