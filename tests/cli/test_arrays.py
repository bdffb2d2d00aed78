"""Inputs and outputs of ``run``, without a model."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tvm_fusion.build import TensorSpec
from tvm_fusion.cli.arrays import collect_inputs, parse_inputs, save_outputs, summary


def tensor(name: str, shape: tuple[int | str, ...], dtype: str = "float32") -> TensorSpec:
    return TensorSpec(name, shape, dtype)


IMAGE = tensor("image", (2, 3))
TOKENS = tensor("tokens", (4,), "int64")


def save(folder, array) -> dict:
    np.save(folder / "a.npy", array)
    return {"image": folder / "a.npy"}


def test_files_are_read_and_the_rest_is_random(tmp_path) -> None:
    value = np.arange(6, dtype="float32").reshape(2, 3)
    image, tokens = collect_inputs([IMAGE, TOKENS], save(tmp_path, value), seed=1)
    np.testing.assert_array_equal(image, value)
    assert tokens.dtype == np.int64
    assert set(tokens) <= {0, 1}


def test_random_inputs_follow_the_seed() -> None:
    one, same, other = (collect_inputs([IMAGE], {}, seed)[0] for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, same)
    assert (one != other).any()


def test_bfloat16_survives_the_file_format(tmp_path) -> None:
    value = np.array([[1.5, 2, 3], [4, 5, 6]], ml_dtypes.bfloat16)
    (read,) = collect_inputs([tensor("image", (2, 3), "bfloat16")], save(tmp_path, value), 0)
    assert read.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(read, value)


@pytest.mark.parametrize(
    ("array", "held"),
    [
        (np.zeros((2, 3)), "float64[2, 3]"),
        (np.zeros((3, 2), "float32"), "float32[3, 2]"),
        (np.zeros(6, "float32"), "float32[6]"),
    ],
)
def test_wrong_shape_or_dtype(array, held, tmp_path) -> None:
    with pytest.raises(ValueError, match="'image' is float32") as info:
        collect_inputs([IMAGE], save(tmp_path, array), 0)
    assert str(info.value).endswith(f"holds {held}")


def test_symbolic_dimensions(tmp_path) -> None:
    square = tensor("image", ("n", "n"))
    with pytest.raises(ValueError, match="dimension 'n' of input 'image' is not fixed"):
        collect_inputs([square], {}, 0)
    assert collect_inputs([square], save(tmp_path, np.ones((3, 3), "float32")), 0)[0].shape == (
        3,
        3,
    )
    with pytest.raises(ValueError, match="is float32"):
        collect_inputs([square], save(tmp_path, np.ones((3, 4), "float32")), 0)


def test_an_unknown_input(tmp_path) -> None:
    with pytest.raises(ValueError, match="no input 'x'; its inputs are: image, tokens"):
        collect_inputs([IMAGE, TOKENS], {"x": tmp_path / "a.npy"}, 0)


def test_a_missing_file(tmp_path) -> None:
    with pytest.raises(FileNotFoundError):
        collect_inputs([IMAGE], {"image": tmp_path / "none.npy"}, 0)


@pytest.mark.parametrize("content", [b"", b"not an array", b"\x93NUMPY\x01\x00v\x00{'descr"])
def test_files_that_are_no_arrays(content, tmp_path) -> None:
    (tmp_path / "a.npy").write_bytes(content)
    with pytest.raises(ValueError, match="is no array file"):
        collect_inputs([IMAGE], {"image": tmp_path / "a.npy"}, 0)


def test_pickled_objects_are_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="is no array file"):
        collect_inputs([IMAGE], save(tmp_path, np.array([{}], dtype=object)), 0)


def test_archives_are_refused(tmp_path) -> None:
    np.savez(tmp_path / "a.npz", x=np.ones(2))
    with pytest.raises(ValueError, match="holds several arrays"):
        collect_inputs([IMAGE], {"image": tmp_path / "a.npz"}, 0)


@pytest.mark.parametrize("text", ["image", "=a.npy", "image="])
def test_malformed_options(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not of the form NAME=FILE\.npy"):
        parse_inputs([text])


def test_an_input_twice() -> None:
    with pytest.raises(ValueError, match="gives 'image' twice"):
        parse_inputs(["image=a.npy", "image=b.npy"])


def test_outputs_are_saved_under_safe_distinct_names(tmp_path) -> None:
    signature = [tensor("a/b:0", (1,)), tensor("a_b_0", (1,))]
    arrays = [np.ones(1, "float32"), np.zeros(1, "float32")]
    files = save_outputs(tmp_path / "out", signature, arrays)
    assert [file.name for file in files] == ["a_b_0.npy", "a_b_0_1.npy"]
    np.testing.assert_array_equal(np.load(files[0]), arrays[0])


def test_summaries() -> None:
    assert summary(np.array([1, 2, 6], "float32")) == "float32[3] min 1 mean 3 max 6"
    assert summary(np.zeros((0, 2), "int8")) == "int8[0, 2]"
    assert summary(np.array([1, 2], ml_dtypes.bfloat16)) == "bfloat16[2] min 1 mean 1.5 max 2"
