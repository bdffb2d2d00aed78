"""Blocks of real networks on a GPU: every group of every strategy equals the unfused operators."""

from __future__ import annotations

import pytest

import tvm_fusion as tf
from tvm_fusion.testing.modules import ALL_KINDS, random_module
from tvm_fusion.testing.named_blocks import NAMED_BLOCKS, named_block

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", sorted(NAMED_BLOCKS))
def test_block(name, dtype):
    report = tf.verify(named_block(name, dtype), "cuda", inputs=1)
    assert report.passed, str(report)


@pytest.mark.parametrize("balance", ["pad", "warps"])
@pytest.mark.parametrize(
    "name", ["repvgg", "head_add", "head_concat", "cross_1_4", "cross_kernels", "inception", "fire"]
)
def test_balanced_block(name, balance):
    config = tf.FusionConfig(balance=balance)
    report = tf.verify(named_block(name, "float16"), "cuda", config=config, inputs=1)
    assert report.passed, str(report)


@pytest.mark.parametrize("strategies", ["cross", "vertical,cross", "compound", "horizontal"])
@pytest.mark.parametrize("seed", range(12))
def test_random_graph(seed, strategies):
    module = random_module(seed, operators=18, kinds=ALL_KINDS)
    config = tf.FusionConfig(strategies=strategies, balance="warps")
    report = tf.verify(module, "cuda", config=config, inputs=1)
    assert report.passed, str(report)
