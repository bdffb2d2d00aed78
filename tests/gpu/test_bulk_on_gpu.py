"""Kernels of the copy engine on a GPU of their arch: values, the same bits at every run, no hazard.

Each runs in a process of its own with a limit of time, since what a missing arrival does on a GPU is to wait for ever.
"""

from __future__ import annotations

import shutil
import subprocess
import sys

import numpy as np
import pytest
import tvm

from tvm_fusion.guards.bulk_tiles import BulkTile
from tvm_fusion.testing.bulk_models import compile_with_tile, feed_forward
from tvm_fusion.testing.sanitizer import explain
from tvm_fusion.verification.reference import Reference

pytestmark = pytest.mark.gpu

#: Rows, depth and columns; the last three have tails in every axis, and more tiles than there are multiprocessors.
SHAPES = {
    "whole": (2048, 768, 1024),
    "tails": (1999, 776, 1016),
    "short": (4000, 64, 3104),
    "long": (1100, 4104, 2080),
}

TILES = {
    "128x256": BulkTile(128, 256, 64, 8, 1, 1, 4, bulk=1),
    "128x256 interleaved": BulkTile(128, 256, 64, 8, 1, 1, 3),
    "256x128": BulkTile(256, 128, 64, 8, 1, 1, 4, bulk=1),
    "turns": BulkTile(128, 128, 64, 4, 1, 1, 4, bulk=1, turns=2),
    "turns of 64 rows": BulkTile(64, 128, 64, 4, 1, 1, 6, bulk=1, turns=2),
}

_RUN = """
import sys
import numpy as np
import tvm_fusion as tf
graph, times = sys.argv[3] == "graph", int(sys.argv[4])
model = tf.load(sys.argv[1], cuda_graph=graph)
arrays = [np.load(f"{sys.argv[2]}/{number}.npy") for number in range(2)]
first = None
for _ in range(times):
    found = np.asarray(model(*arrays)).copy()
    first = found if first is None else first
    if first.tobytes() != found.tobytes():
        raise SystemExit("two runs gave different bits")
np.save(f"{sys.argv[2]}/result.npy", first)
"""


def library(folder, shape: tuple[int, int, int], tile: BulkTile):
    """An exported model: the command that runs it, and its inputs."""
    if tvm.cuda(0).compute_version != "9.0":
        pytest.skip("these kernels are for compute capability 9.0")
    module = feed_forward(*shape)
    compile_with_tile(module, tile).export(folder / "model.so")
    rng = np.random.default_rng(0)
    rows, _, columns = shape
    arrays = [rng.standard_normal(size).astype("float16") for size in (shape[:2], (rows, columns))]
    for number, array in enumerate(arrays):
        np.save(folder / f"{number}.npy", array)
    command = [sys.executable, "-c", _RUN, str(folder / "model.so"), str(folder)]
    return command, arrays


#: Rows of a result that are compared: float64 on a CPU takes half a minute for all of them.
CHECKED = 48


def compared(shape: tuple[int, int, int], arrays: list[np.ndarray], folder) -> tuple:
    """Some rows of what was computed, the last ones among them, and of what has to be."""
    rows, depth, columns = shape
    last = np.arange(rows - 8, rows)
    chosen = np.union1d(np.random.default_rng(1).choice(rows - 8, CHECKED - 8, replace=False), last)
    # A model of fewer rows has the same weights.
    reference = Reference(feed_forward(CHECKED, depth, columns), "float16")
    found = np.load(folder / "result.npy").astype("float64")
    assert found.shape == (rows, columns) and np.isfinite(found).all()
    return found[chosen], reference(*(array[chosen] for array in arrays))[0]


@pytest.mark.parametrize("graph", ["graph", "calls"])
@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_values_and_bits(shape, tile, graph, tmp_path):
    if tile.bulk > 1 and shape[2] % 32:
        pytest.skip("these columns cannot be interleaved")
    command, arrays = library(tmp_path, shape, tile)
    done = subprocess.run(
        [*command, graph, "20"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-1000:]
    found, expected = compared(shape, arrays, tmp_path)
    assert np.linalg.norm(found - expected) <= 1e-3 * np.linalg.norm(expected)
    assert np.abs(found - expected).max() <= 4e-3 * np.abs(expected).max()


@pytest.mark.parametrize("tile", ["128x256", "turns"])
@pytest.mark.parametrize("tool", ["racecheck", "synccheck", "memcheck"])
def test_no_hazard(tool, tile, tmp_path):
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    command, _ = library(tmp_path, (600, 520, 776), TILES[tile])
    done = subprocess.run(
        [sanitizer, "--tool", tool, *command, "calls", "2"],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    wrong = explain(done.stdout)
    assert not wrong, f"{tool}: {wrong}"
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
