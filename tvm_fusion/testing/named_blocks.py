"""The blocks by name, at the sizes of the networks that they come from, for benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from ..compat import tvm
from . import blocks, synthetic_blocks, transformer_blocks
from .modules import parallel_convs

#: Builder by name; each takes ``dtype``, and those of images also ``layout``.
NAMED_BLOCKS: Mapping[str, Callable[..., tvm.IRModule]] = {
    "bottleneck": blocks.resnet_bottleneck,
    "bottleneck_projection": partial(blocks.resnet_bottleneck, channels=64, projection=True),
    "bottleneck_strided": partial(
        blocks.resnet_bottleneck, width=128, stride=2, projection=True
    ),
    "bottleneck_last": partial(blocks.resnet_bottleneck, channels=2048, width=512, size=7),
    "residual": blocks.residual_block,
    "repvgg": blocks.repvgg_block,
    "squeeze_excite": partial(blocks.squeeze_excite, residual=True),
    "squeeze_excite_dense": partial(blocks.squeeze_excite, dense=True),
    "head_add": blocks.segmentation_head,
    "head_concat": partial(blocks.segmentation_head, join="concat"),
    "inception": blocks.inception_module,
    "inception_last": partial(
        blocks.inception_module, channels=832, widths=(384, 192, 384, 48, 128, 128), size=7
    ),
    "inverted_residual": blocks.inverted_residual,
    "inverted_residual_wide": partial(blocks.inverted_residual, channels=160, size=7),
    "inverted_residual_strided": partial(
        blocks.inverted_residual, channels=16, outputs=24, size=112, stride=2
    ),
    "fire": blocks.fire,
    "shuffle": blocks.shuffle_unit,
    "shuffle_strided": partial(blocks.shuffle_unit, stride=2),
    "csp": blocks.csp_block,
    "depthwise_pointwise": blocks.depthwise_pointwise,
    "depthwise_pointwise_small": partial(
        blocks.depthwise_pointwise, channels=512, outputs=512, size=14
    ),
    "conv3d": synthetic_blocks.conv3d_branches,
    "cross_1_1": synthetic_blocks.cross_pair,
    "cross_1_2": partial(synthetic_blocks.cross_pair, ratio=2),
    "cross_1_3": partial(synthetic_blocks.cross_pair, ratio=3),
    "cross_1_4": partial(synthetic_blocks.cross_pair, ratio=4),
    "cross_kernels": partial(synthetic_blocks.cross_pair, kernels=(3, 1), channels=64, outputs=64),
    "four_convs": partial(parallel_convs, 4),
    "four_convs_relu": partial(parallel_convs, 4, relu=True),
    "bert": transformer_blocks.bert_block,
    "bert_batch8": partial(transformer_blocks.bert_block, batch=8),
    "llama": transformer_blocks.llama_layer,
    "llama_grouped": partial(transformer_blocks.llama_layer, kv_heads=2, sequence=64),
    "projections": transformer_blocks.head_projections,
    "dense_norm_heads": transformer_blocks.dense_norm_heads,
    "dense_norm": transformer_blocks.dense_norm,
    "dense_gelu": transformer_blocks.dense_gelu,
    "matmul_pair": transformer_blocks.matmul_pair,
    "relaxation_chain": synthetic_blocks.relaxation_chain,
    "summed_loads": synthetic_blocks.summed_loads,
    "elementwise_chain": partial(
        synthetic_blocks.elementwise_chain, 24, rows=1024, width=1024
    ),
}  # fmt: skip

#: Those that also take ``layout``.
IMAGE_BLOCKS: frozenset[str] = frozenset(
    name
    for name, make in NAMED_BLOCKS.items()
    if "layout" in getattr(make, "func", make).__kwdefaults__
)


def named_block(name: str, dtype: str = "float32") -> tvm.IRModule:
    """Build a block; 16-bit images come in NHWC, the layout that 16-bit models are converted to.

    Raises
    ------
    ValueError
        If there is no such block.
    """
    if name not in NAMED_BLOCKS:
        raise ValueError(f"unknown block {name!r}; choose from {', '.join(NAMED_BLOCKS)}")
    options = {"dtype": dtype}
    if dtype != "float32" and name in IMAGE_BLOCKS:
        options["layout"] = "NHWC"
    return NAMED_BLOCKS[name](**options)
