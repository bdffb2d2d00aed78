"""Products that are timed alone: their sizes, and what follows each in the same kernel."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    """A product of ``rows`` x ``depth`` activations and ``columns`` x ``depth`` weights, and what follows it."""

    rows: int
    depth: int
    columns: int
    after: str = "nothing"

    @property
    def flops(self) -> float:
        """Of the product alone."""
        return 2.0 * self.rows * self.depth * self.columns


#: Transformer layers: batch 8 of 512 tokens with 768 features, and 512 tokens with 4096.
SHAPES: dict[str, Shape] = {
    "smoke": Shape(200, 192, 320, "bias_gelu_residual"),
    "cube4096": Shape(4096, 4096, 4096),
    "cube4096_gelu": Shape(4096, 4096, 4096, "bias_gelu"),
    "bert_projections": Shape(4096, 768, 2304, "bias"),
    "bert_output": Shape(4096, 768, 768, "bias_residual"),
    "bert_up": Shape(4096, 768, 3072, "bias_gelu"),
    "bert_down": Shape(4096, 3072, 768, "bias_residual"),
    "llama_output": Shape(512, 4096, 4096, "residual"),
    "llama_projections": Shape(512, 4096, 12288),
    "llama_gates": Shape(512, 4096, 22016),
    "llama_down": Shape(512, 11008, 4096, "residual"),
    "cube8192": Shape(8192, 8192, 8192),
    "cube8192_gelu": Shape(8192, 8192, 8192, "bias_gelu"),
    # Few rows, tails, and 1x1 convolutions of 32 images: mostly bound by memory, or by one wave of tiles.
    "short_up": Shape(128, 768, 3072, "bias_gelu"),
    "short_down": Shape(128, 3072, 768, "bias_residual"),
    "tails": Shape(1000, 520, 1000, "bias"),
    "narrow": Shape(1024, 1024, 1024, "bias"),
    "middle": Shape(2048, 2048, 2048, "residual"),
    "expand_56": Shape(100352, 24, 144, "bias"),
    "project_56": Shape(100352, 144, 24, "bias_residual"),
    "expand_14": Shape(6272, 96, 576, "bias"),
    "project_14": Shape(6272, 576, 96, "bias_residual"),
    "last_7": Shape(1568, 320, 1280, "bias"),
    "wide_56": Shape(100352, 64, 256, "bias_residual"),
    "thin_56": Shape(100352, 256, 64, "bias"),
    "wide_14": Shape(6272, 256, 1024, "bias_residual"),
    "thin_14": Shape(6272, 1024, 256, "bias"),
    "wide_7": Shape(1568, 512, 2048, "bias_residual"),
    "thin_7": Shape(1568, 2048, 512, "bias"),
}
