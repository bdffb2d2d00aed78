"""Models that packages on PyPI carry, on an image of text, against onnxruntime."""

from __future__ import annotations

import subprocess
import sys
import zipfile

import numpy as np
import pytest

import tvm_fusion as tf

pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.slow

#: 5 by 7 pixels a character.
_GLYPHS = {
    "T": "11111 00100 00100 00100 00100 00100 00100",
    "V": "10001 10001 10001 10001 10001 01010 00100",
    "M": "10001 11011 10101 10101 10001 10001 10001",
    "2": "01110 10001 00001 00010 00100 01000 11111",
    "7": "11111 00001 00010 00100 01000 01000 01000",
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """PP-OCRv4's three networks, out of the wheel of rapidocr-onnxruntime."""
    folder = tmp_path_factory.mktemp("wheel")
    wheel = "rapidocr-onnxruntime==1.4.4"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
    done = subprocess.run([*command, wheel], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"pip cannot download {wheel}: {done.stderr.strip().splitlines()[-1:]}")
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if name.endswith(".onnx")]
        for name in names:
            archive.extract(name, folder)
    return {
        kind: next(folder / n for n in names if f"_{kind}_" in n) for kind in ("det", "cls", "rec")
    }


def page(height, width, text="TVM27", scale=5):
    """A line of black text on white, as the networks want it: ``[1, 3, height, width]`` from -1 to 1."""
    rows = [[[int(c) for c in row] for row in _GLYPHS[char].split()] for char in text]
    line = np.concatenate([np.pad(np.array(g), ((0, 0), (1, 1))) for g in rows], axis=1)
    line = np.kron(line, np.ones((scale, scale), int))[: height - 4, : width - 4]
    image = np.ones((height, width), "float32")
    top = (height - line.shape[0]) // 2
    image[top : top + line.shape[0], 2 : 2 + line.shape[1]] -= 2 * line
    return np.repeat(image[None, None], 3, axis=1)


@pytest.mark.parametrize(
    ("kind", "size"), [("det", (96, 192)), ("cls", (48, 192)), ("rec", (48, 192))]
)
def test_optical_character_recognition(models, kind, size):
    x = page(*size)
    session = onnxruntime.InferenceSession(models[kind])
    name = session.get_inputs()[0].name
    (wanted,) = session.run(None, {name: x})
    module = tf.frontend.load(models[kind], shape={name: x.shape})
    (got,) = tf.compile(module, "llvm", verify=False, strict=True)(x)
    assert np.abs(got - wanted).max() <= 1e-4 * max(1.0, np.abs(wanted).max())
    if kind == "rec":  # the same characters, some of which are none
        read = wanted.argmax(-1)
        np.testing.assert_array_equal(got.argmax(-1), read)
        assert len(set(read.ravel()) - {0}) >= 3
    if kind == "det":
        assert wanted.max() > 0.5  # text was found


def test_without_sizes_the_recogniser_is_refused(models):
    """Its attention has as many steps as the image is wide."""
    with pytest.raises(tf.errors.FusionError, match=r"[Ss]hape|dimension"):
        tf.plan(tf.frontend.load(models["rec"]), "llvm")
