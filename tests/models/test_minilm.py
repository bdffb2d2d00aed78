"""all-MiniLM-L6-v2 with its own weights: the embeddings of a few hundred sentences, against PyTorch."""

from __future__ import annotations

import numpy as np
import pytest

import tvm_fusion as tf

torch = pytest.importorskip("torch")

from tvm_fusion.testing import minilm  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.skipif(minilm.missing() is not None, reason=f"needs {minilm.missing()}"),
]

BATCH = 8


def embeddings(dtype: str, length: int, count: int) -> tuple[np.ndarray, np.ndarray, tf.Plan]:
    """What PyTorch in float32 and the compiled model make of so many sentences, and the plan."""
    net = minilm.encoder()
    ids, mask = minilm.tokens(minilm.sentences(count), length)
    with torch.no_grad():
        example = tuple(torch.from_numpy(a[:BATCH]) for a in (ids, mask))
        program = torch.export.export(net, example)
        wanted = net(torch.from_numpy(ids), torch.from_numpy(mask)).numpy()
    module = tf.frontend.torch.load(program, dtype=dtype)
    compiled = tf.compile(module, "llvm", verify=False, strict=True)
    parts = [
        compiled(ids[i : i + BATCH], mask[i : i + BATCH])[0] for i in range(0, len(ids), BATCH)
    ]
    return wanted, np.concatenate(parts), compiled.plan


def test_sentences_vary():
    _, mask = minilm.tokens(minilm.sentences(320), 128)
    lengths = mask.sum(1)
    assert len(lengths) == 320
    assert lengths.min() < 10
    assert lengths.max() > 60


@pytest.mark.parametrize(("length", "count"), [(24, 120), (96, 320)])
def test_embeddings(length, count):
    wanted, got, plan = embeddings("float32", length, count)
    assert got.shape == (count, 384)
    assert minilm.cosines(wanted, got).min() >= 0.999999
    # Seven kernels a layer: products and what follows them share one.
    assert plan.totals.launches_after < 60


def test_half_precision():
    wanted, got, _ = embeddings("float16", 24, 16)
    assert minilm.cosines(wanted, got).min() >= 0.9999
