"""The rows as PyTorch modules with seeded weights: the one definition that every contender shares.

``build`` gives a module in float32 whose weights and inputs are already rounded to the row's dtype,
so that every framework, and the float64 reference, starts from equal values.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from llama import LlamaLayer, RmsNorm
from rows import ROWS, Row
from torch import Tensor, nn

TORCH_DTYPE = {"float16": torch.float16, "float32": torch.float32}


@dataclasses.dataclass
class Workload:
    """A module in evaluation mode and its inputs, float32 with values rounded to ``dtype``."""

    row: Row
    dtype: str
    module: nn.Module
    inputs: tuple[Tensor, ...]


class ConvSum(nn.Module):
    """Parallel 3×3 convolutions of one map, summed; with ``relu`` after each."""

    def __init__(self, relu: bool, count: int = 4) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv2d(64, 64, 3, padding=1, bias=False) for _ in range(count)
        )
        self.relu = relu

    def forward(self, x: Tensor) -> Tensor:
        parts = [F.relu(conv(x)) if self.relu else conv(x) for conv in self.convs]
        y = parts[0]
        for part in parts[1:]:
            y = y + part
        return y


class DenseNormHeads(nn.Module):
    """Heads of Linear and LayerNorm on one input, returned apart."""

    def __init__(self, heads: int = 4, width: int = 1024) -> None:
        super().__init__()
        self.dense = nn.ModuleList(nn.Linear(width, width) for _ in range(heads))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(heads))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(n(d(x)) for d, n in zip(self.dense, self.norms, strict=True))


class Projections(nn.Module):
    """Q, K and V projections of every head, each a product of its own, returned apart."""

    def __init__(self, count: int = 24, width: int = 512, outputs: int = 64) -> None:
        super().__init__()
        self.dense = nn.ModuleList(nn.Linear(width, outputs, bias=False) for _ in range(count))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(dense(x) for dense in self.dense)


def conv_bn_relu(count: int) -> nn.Module:
    """``count`` times Conv 3×3 of 64 channels, BatchNorm, ReLU."""
    layers: list[nn.Module] = []
    for _ in range(count):
        layers += [nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    return nn.Sequential(*layers)


class Cross(nn.Module):
    """Two convolutions of one map, each with a ReLU, their sum, and a ReLU."""

    def __init__(self, kernels: tuple[int, int]) -> None:
        super().__init__()
        self.left, self.right = (nn.Conv2d(64, 64, k, padding=k // 2) for k in kernels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(F.relu(self.left(x)) + F.relu(self.right(x)))


class GeluNorm(nn.Module):
    """Bias, GELU by the error function, residual, LayerNorm."""

    def __init__(self, width: int = 4096) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(width))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.norm(F.gelu(x + self.bias) + residual)


class BertBlock(nn.Module):
    """Encoder block of BERT-base (Devlin et al., 2019), normalised after each residual.

    ``library_attention`` takes PyTorch's attention; without it attention is written out, which is
    what is exported for this project (equal mathematics).
    """

    def __init__(self, hidden: int = 768, heads: int = 12) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(hidden, hidden) for _ in range(3))
        self.output = nn.Linear(hidden, hidden)
        self.attention_norm = nn.LayerNorm(hidden)
        self.grow, self.shrink = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.library_attention = True

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self._split(dense(x)) for dense in (self.query, self.key, self.value))
        if self.library_attention:
            mixed = F.scaled_dot_product_attention(q, k, v)
        else:
            scores = torch.matmul(q, k.transpose(-1, -2)) * (1.0 / math.sqrt(q.shape[-1]))
            mixed = torch.matmul(torch.softmax(scores, -1), v)
        mixed = mixed.transpose(1, 2).reshape(x.shape)
        y = self.attention_norm(self.output(mixed) + x)
        return self.norm(self.shrink(F.gelu(self.grow(y))) + y)

    def _split(self, y: Tensor) -> Tensor:
        batch, tokens, hidden = y.shape
        return y.view(batch, tokens, self.heads, hidden // self.heads).transpose(1, 2)


def depthwise_pointwise() -> nn.Module:
    """A MobileNet pair."""
    return nn.Sequential(
        nn.Conv2d(32, 32, 3, padding=1, groups=32, bias=False), nn.BatchNorm2d(32), nn.ReLU6(),
        nn.Conv2d(32, 64, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU6(),
    )  # fmt: skip


class LastHidden(nn.Module):
    """An encoder of the transformers package as a function of token numbers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens).last_hidden_state


def _network(name: str) -> nn.Module:
    """A published network with random weights; needs torchvision or transformers."""
    if name == "bert_base_128":
        from transformers import BertConfig, BertModel

        return LastHidden(BertModel(BertConfig(), add_pooling_layer=False))
    from torchvision import models

    if name == "inception_v1":
        return models.googlenet(weights=None, aux_logits=False, init_weights=False)
    return getattr(models, name)(weights=None)


_MAP56, _MAP128 = (1, 64, 56, 56), (1, 64, 128, 128)

_MAKERS: dict[str, tuple[Callable[[], nn.Module], tuple[tuple[int, ...], ...]]] = {
    "empty": (nn.ReLU, ((32,),)),
    "convsum4": (lambda: ConvSum(relu=False), (_MAP128,)),
    "convrelusum4": (lambda: ConvSum(relu=True), (_MAP128,)),
    "convsum3": (lambda: ConvSum(relu=False, count=3), (_MAP128,)),
    "cbr_map": (lambda: conv_bn_relu(1), (_MAP128,)),
    "fcln4": (DenseNormHeads, ((32, 1024),)),
    "qkv8": (Projections, ((512, 512),)),
    "cbr1": (lambda: conv_bn_relu(1), (_MAP56,)),
    "cbr3": (lambda: conv_bn_relu(3), (_MAP56,)),
    "cross31": (lambda: Cross((3, 1)), (_MAP56,)),
    "cross33": (lambda: Cross((3, 3)), (_MAP128,)),
    "dwpw": (depthwise_pointwise, ((1, 32, 112, 112),)),
    "gelu_ln": (GeluNorm, ((8192, 4096), (8192, 4096))),
    "bert128": (BertBlock, ((1, 128, 768),)),
    "bert512x8": (BertBlock, ((8, 512, 768),)),
    "llama7b_layer_512": (LlamaLayer, ((1, 512, 4096),)),
}


def build(name: str, dtype: str, seed: int = 0) -> Workload:
    """Make a row's module and inputs; the values depend on ``seed`` and the dtype only.

    Raises
    ------
    ImportError
        If a whole network's package is not installed.
    """
    row = ROWS[name]
    torch.manual_seed(seed)  # the constructors draw weights too
    generator = torch.Generator().manual_seed(seed)
    if row.network:
        base, _, batch = name.rpartition("_b")
        module = _network(base)
        shapes: tuple[tuple[int, ...], ...] = ((int(batch), 3, 224, 224),)
        if not row.image:
            tokens = torch.randint(0, 30000, (int(batch), 128), generator=generator)
            return Workload(row, dtype, _rounded(_randomise(module, generator), dtype), (tokens,))
    else:
        make, shapes = _MAKERS[name]
        module = make()
    module = _rounded(_randomise(module, generator), dtype)
    inputs = tuple(torch.randn(s, generator=generator) for s in shapes)
    return Workload(row, dtype, module, tuple(x.to(TORCH_DTYPE[dtype]).float() for x in inputs))


def _randomise(module: nn.Module, generator: torch.Generator) -> nn.Module:
    """Give a module weights that keep values of order one from layer to layer; evaluation mode."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            fan_in = layer.weight[0].numel()
            layer.weight.data.normal_(0, math.sqrt(1.5 / fan_in), generator=generator)
            if layer.bias is not None:
                layer.bias.data.uniform_(-0.5, 0.5, generator=generator)
        elif isinstance(layer, nn.BatchNorm2d | nn.LayerNorm):
            layer.weight.data.uniform_(0.8, 1.2, generator=generator)
            layer.bias.data.uniform_(-0.2, 0.2, generator=generator)
        elif isinstance(layer, RmsNorm):
            layer.weight.data.uniform_(0.8, 1.2, generator=generator)
        elif isinstance(layer, GeluNorm):
            layer.bias.data.uniform_(-0.5, 0.5, generator=generator)
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.uniform_(-0.2, 0.2, generator=generator)
            layer.running_var.uniform_(0.8, 1.2, generator=generator)
    return module.eval().requires_grad_(False)


def _rounded(module: nn.Module, dtype: str) -> nn.Module:
    return module.to(TORCH_DTYPE[dtype]).float()


def outputs_of(result: Tensor | tuple[Tensor, ...]) -> list[Tensor]:
    """A module's results as a list."""
    return [result] if isinstance(result, Tensor) else list(result)


def place(
    work: Workload, device: str, module: nn.Module | None = None
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Bring a module (the row's own by default) and the inputs to a device, in the row's dtype.

    At 16 bits images are channels last in memory, the form in which PyTorch is fastest.
    """
    dtype = TORCH_DTYPE[work.dtype]
    module = (module or work.module).to(device=device, dtype=dtype)
    inputs = tuple(x.to(device, dtype if x.is_floating_point() else x.dtype) for x in work.inputs)
    if work.row.image and work.dtype != "float32":
        module = module.to(memory_format=torch.channels_last)
        inputs = tuple(x.contiguous(memory_format=torch.channels_last) for x in inputs)
    return module, inputs


class ChannelsLast(nn.Module):
    """A module of images as a function of channels-last arrays ``[N, H, W, C]``.

    That is the memory which the other contenders get, so no contender transposes anything.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        y = self.module(x.permute(0, 3, 1, 2))
        return y.permute(0, 2, 3, 1) if y.ndim == 4 else y


def exported(work: Workload) -> torch.export.ExportedProgram:
    """Export a row for this project: float32 (the importer converts), 16-bit images channels last."""
    module, inputs = work.module, work.inputs
    for layer in module.modules():
        if isinstance(layer, BertBlock | LlamaLayer):
            layer.library_attention = False
    if work.row.network and not work.row.image:
        module.model.config._attn_implementation = "eager"
    if work.row.image and work.dtype != "float32":
        module = ChannelsLast(module)
        inputs = tuple(x.permute(0, 2, 3, 1).contiguous() for x in inputs)
    try:
        with torch.no_grad():
            return torch.export.export(module, inputs)
    finally:
        for layer in work.module.modules():
            if isinstance(layer, BertBlock | LlamaLayer):
                layer.library_attention = True
