"""The benchmark's rows: what each one is, its work, its least traffic, and its physical floor.

Nothing here needs a framework: the modules themselves are in ``torch_rows.py``. The floor is

    max(bytes / copy rate, FLOPs / matrix product rate) + k × the time of an empty kernel,

with the least bytes (each input, weight and output moved once), the least FLOPs (a sum of
convolutions of one input is one convolution) and the least number k of dependent launches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

#: Bytes of an element.
ITEMSIZE = {"float16": 2, "float32": 4}
DTYPES = ("float16", "float32")


@dataclasses.dataclass(frozen=True)
class Row:
    """One workload.

    Attributes
    ----------
    name, title : str
        Short name, and what it computes.
    flops : int
        Least floating-point operations; a multiply-add counts two. 0 where not counted.
    elements : int
        Least elements moved: inputs, weights and outputs, each once. 0 where not counted.
    launches : int
        Least number of dependent launches (``k`` of the floor).
    image : bool
        Whether inputs and outputs are images: ``[N, C, H, W]``, channels last in memory at 16 bits.
    target : bool
        Whether the must targets hold for it.
    network : bool
        Whether it is a whole network, measured only when asked for.
    """

    name: str
    title: str
    flops: int = 0
    elements: int = 0
    launches: int = 1
    image: bool = False
    target: bool = False
    network: bool = False

    def bytes(self, dtype: str) -> int:
        """Least bytes moved."""
        return self.elements * ITEMSIZE[dtype]

    def floor_us(self, dtype: str, copy_rate: float, flop_rate: float, launch_us: float) -> float:
        """Physical floor in microseconds, from rates in bytes and FLOPs per second; NaN if not counted."""
        if not self.elements:
            return float("nan")
        seconds = max(self.bytes(dtype) / copy_rate, self.flops / flop_rate)
        return seconds * 1e6 + self.launches * launch_us


def _conv(size: int, inner: int, outer: int, kernel: int, count: int = 1, groups: int = 1) -> int:
    """FLOPs of ``count`` stride-1 convolutions of a ``size``² map."""
    return 2 * count * size * size * outer * (inner // groups) * kernel * kernel


def _map(size: int, channels: int) -> int:
    return size * size * channels


def _bert_flops(tokens: int, batch: int, hidden: int = 768) -> int:
    """FLOPs of an encoder block: four projections, the FFN, and attention's two products."""
    products = 2 * batch * tokens * hidden * (4 * hidden + 2 * 4 * hidden)
    return products + 2 * 2 * batch * tokens * tokens * hidden


def _bert_elements(tokens: int, batch: int, hidden: int = 768) -> int:
    return 12 * hidden * hidden + 13 * hidden + 2 * batch * tokens * hidden


def _llama_flops(tokens: int, hidden: int = 4096, inner: int = 11008) -> int:
    """FLOPs of a decoder layer: seven projections, and attention's two products below the diagonal."""
    products = 2 * tokens * (4 * hidden * hidden + 3 * hidden * inner)
    return products + 2 * tokens * (tokens + 1) * hidden


def _llama_elements(tokens: int, hidden: int = 4096, inner: int = 11008) -> int:
    return 4 * hidden * hidden + 3 * hidden * inner + 2 * hidden + 2 * tokens * hidden


_W33 = 64 * 64 * 9

_BLOCKS = (
    Row("convsum4", "4 convolutions 3×3 of one 128×128×64 map, summed", _conv(128, 64, 64, 3),
        2 * _map(128, 64) + _W33, image=True, target=True),
    Row("convrelusum4", "the same with a ReLU in each branch", _conv(128, 64, 64, 3, 4),
        2 * _map(128, 64) + 4 * _W33, image=True, target=True),
    Row("fcln4", "4 × (Linear 1024→1024, LayerNorm) of [32, 1024]", 2 * 32 * 1024 * 4096,
        4 * 1024 * 1024 + 32 * 1024 + 32 * 4096 + 3 * 4096, target=True),
    Row("qkv8", "24 projections 512→64 of [512, 512]", 2 * 512 * 512 * 1536,
        512 * 512 + 512 * 1536 + 512 * 1536, target=True),
    Row("cbr1", "Conv 3×3, BN, ReLU, 64 channels, 56×56", _conv(56, 64, 64, 3),
        2 * _map(56, 64) + _W33, image=True, target=True),
    Row("cbr3", "3 × (Conv 3×3, BN, ReLU), 64 channels, 56×56", _conv(56, 64, 64, 3, 3),
        2 * _map(56, 64) + 3 * _W33, launches=3, image=True, target=True),
    Row("cross31", "relu(conv 3×3) + relu(conv 1×1), ReLU, 64 channels, 56×56",
        _conv(56, 64, 64, 3) + _conv(56, 64, 64, 1), 2 * _map(56, 64) + _W33 + 64 * 64,
        image=True, target=True),
    Row("cross33", "relu(conv 3×3) + relu(conv 3×3), ReLU, 64 channels, 128×128",
        _conv(128, 64, 64, 3, 2), 2 * _map(128, 64) + 2 * _W33, image=True, target=True),
    Row("dwpw", "depthwise 3×3, BN, ReLU6, pointwise 32→64, BN, ReLU6, 112×112",
        _conv(112, 32, 32, 3, groups=32) + _conv(112, 32, 64, 1),
        _map(112, 32) + _map(112, 64) + 32 * 9 + 32 * 64, image=True, target=True),
    Row("gelu_ln", "bias, erf GELU, residual, LayerNorm of [8192, 4096]", 15 * 8192 * 4096,
        3 * 8192 * 4096 + 3 * 4096, target=True),
    Row("bert128", "BERT-base block, batch 1, 128 tokens", _bert_flops(128, 1),
        _bert_elements(128, 1), launches=5),
    Row("bert512x8", "BERT-base block, batch 8, 512 tokens", _bert_flops(512, 8),
        _bert_elements(512, 8)),
)  # fmt: skip

_NETWORKS = tuple(
    Row(f"{name}_b{batch}", f"{title}, batch {batch}", image=image, network=True)
    for name, title, image in (
        ("resnet50", "ResNet-50", True),
        ("mobilenet_v2", "MobileNetV2", True),
        ("inception_v1", "Inception v1 (GoogLeNet)", True),
        ("bert_base_128", "BERT-base, 128 tokens", False),
    )
    for batch in (1, 32)
)

#: Lines of the table of ``figures.py`` that no row above is: measured when asked for by name.
_FIGURES = (
    Row(
        "convsum3",
        "3 convolutions 3×3 of one 128×128×64 map, summed",
        _conv(128, 64, 64, 3),
        2 * _map(128, 64) + _W33,
        image=True,
    ),
    Row(
        "cbr_map",
        "Conv 3×3, BN, ReLU of a 128×128×64 map (4 MiB in float32)",
        _conv(128, 64, 64, 3),
        2 * _map(128, 64) + _W33,
        image=True,
    ),
)

#: Parts of large models, measured when asked for by name: 0.4 GB of weights in float16.
_LAYERS = (
    Row(
        "llama7b_layer_512",
        "LLaMA-7B decoder layer, batch 1, 512 tokens",
        _llama_flops(512),
        _llama_elements(512),
        launches=5,
    ),
)

#: The almost empty kernel: what a launch costs by each contender's own path.
EMPTY = Row("empty", "ReLU of 32 elements", 32, 64)

ROWS: dict[str, Row] = {row.name: row for row in (*_BLOCKS, *_NETWORKS, *_FIGURES, *_LAYERS, EMPTY)}
BLOCKS: tuple[str, ...] = tuple(row.name for row in _BLOCKS)
NETWORKS: tuple[str, ...] = tuple(row.name for row in _NETWORKS)

#: Rates that the floor uses, by device name: bytes/s of a device copy, FLOP/s of a large product,
#: and microseconds of an empty kernel inside a graph. Elsewhere, and for other dtypes, the run's own
#: measurements are used.
KNOWN_RATES = {("NVIDIA H200", "float16"): (4.24e12, 666e12, 1.04)}


def chosen_rows(names: Sequence[str] | None, networks: bool) -> list[str]:
    """Names of the rows to measure, in the order of the table.

    Raises
    ------
    ValueError
        If a name is unknown.
    """
    if names is None:
        return [*BLOCKS, *(NETWORKS if networks else ())]
    wrong = [n for n in names if n not in ROWS or n == EMPTY.name]
    if wrong:
        choices = [n for n in ROWS if n != EMPTY.name]
        raise ValueError(f"unknown rows {', '.join(wrong)}; choose from {', '.join(choices)}")
    wanted = {*names, *(NETWORKS if networks else ())}
    return [n for n in ROWS if n in wanted]
