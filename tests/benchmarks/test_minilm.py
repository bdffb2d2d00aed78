"""The run of all-MiniLM-L6-v2 on a GPU, with a small network in its place, on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import minilm  # noqa: E402

pytestmark = pytest.mark.torch


class Means(torch.nn.Module):
    """The mean of the vectors of a sentence's tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(50, 16)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        weights = mask[:, :, None].to(self.table.weight.dtype)
        return (self.table(ids) * weights).sum(1) / weights.sum(1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    net, rng = Means().eval().requires_grad_(False), np.random.default_rng(0)
    ids = rng.integers(0, 50, (6, 9))
    mask = (np.arange(9) < rng.integers(1, 10, (6, 1))).astype("int64")
    tensors = torch.from_numpy(ids), torch.from_numpy(mask)
    wanted = net(*tensors).numpy()
    program = torch.export.export(net.half(), tuple(t[:3] for t in tensors))
    torch.export.save(program, tmp_path / "minilm.pt2")
    np.savez(tmp_path / "sentences.npz", ids=ids, mask=mask, wanted=wanted, batch=3)
    return tmp_path


def test_equal_embeddings(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert minilm.main(["run", str(folder), "--target", "llvm"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["sentences"] == 6 and found["least_cosine"] > 0.999
    assert found["microseconds_a_batch"] > 0


def test_one_wrong_embedding_is_an_error(folder: Path) -> None:
    with np.load(folder / "sentences.npz") as saved:
        arrays = dict(saved)
    arrays["wanted"][4, 0] += 1
    np.savez(folder / "sentences.npz", **arrays)
    assert minilm.main(["run", str(folder), "--target", "llvm"]) == 1
