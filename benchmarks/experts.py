"""The rows as an expert would write them by hand in PyTorch: merged, folded, with library kernels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from llama import LlamaLayer, MergedLlama
from torch import Tensor, nn
from torch_rows import BertBlock, ConvSum, Cross, DenseNormHeads, GeluNorm, Projections, Workload


def conv_relu(x: Tensor, weight: Tensor, bias: Tensor | None, padding: int) -> Tensor:
    """Convolution, bias and ReLU: cuDNN's one kernel on a GPU."""
    if x.is_cuda:
        one = [1, 1]
        return torch.cudnn_convolution_relu(x, weight, bias, one, [padding, padding], one, 1)
    return F.relu(F.conv2d(x, weight, bias, padding=padding))


def folded(conv: nn.Conv2d, norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    """Weight and bias of a convolution with its batch norm folded in."""
    scale = norm.weight / torch.sqrt(norm.running_var + norm.eps)
    shift = norm.bias - norm.running_mean * scale
    if conv.bias is not None:
        shift = shift + conv.bias * scale
    return conv.weight * scale.view(-1, 1, 1, 1), shift


class Held(nn.Module):
    """A module that holds plain tensors, which follow it to a device and a dtype."""

    def hold(self, **tensors: Tensor) -> None:
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor.detach().clone())


class SummedConvs(Held):
    """One convolution with the weights added."""

    def __init__(self, net: ConvSum) -> None:
        super().__init__()
        self.hold(weight=torch.stack([c.weight for c in net.convs]).sum(0))

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight, padding=1)


class ConcatenatedConvs(Held):
    """One convolution with the weights concatenated, ReLU, and a sum of its slices."""

    def __init__(self, net: ConvSum) -> None:
        super().__init__()
        self.parts = len(net.convs)
        self.hold(weight=torch.cat([c.weight for c in net.convs]))

    def forward(self, x: Tensor) -> Tensor:
        a, *rest = F.relu(F.conv2d(x, self.weight, padding=1)).chunk(self.parts, 1)
        for part in rest:
            a = a + part
        return a


class MergedDenseNorm(Held):
    """One Linear for all heads and a LayerNorm over a view with an axis of heads."""

    def __init__(self, net: DenseNormHeads) -> None:
        super().__init__()
        self.width = net.norms[0].normalized_shape[0]
        self.eps = net.norms[0].eps
        self.hold(
            weight=torch.cat([d.weight for d in net.dense]),
            bias=torch.cat([d.bias for d in net.dense]),
            scale=torch.stack([n.weight for n in net.norms]),
            shift=torch.stack([n.bias for n in net.norms]),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = F.linear(x, self.weight, self.bias).view(len(x), -1, self.width)
        y = F.layer_norm(y, (self.width,), eps=self.eps) * self.scale + self.shift
        return y.unbind(1)


class MergedProjections(Held):
    """One Linear for all projections."""

    def __init__(self, net: Projections) -> None:
        super().__init__()
        self.parts = len(net.dense)
        self.hold(weight=torch.cat([d.weight for d in net.dense]))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return F.linear(x, self.weight).chunk(self.parts, 1)


class FoldedConvs(Held):
    """Convolution + bias + ReLU, batch norms folded."""

    def __init__(self, net: nn.Sequential) -> None:
        super().__init__()
        self.count = len(net) // 3
        for i in range(self.count):
            weight, bias = folded(net[3 * i], net[3 * i + 1])
            self.hold(**{f"weight{i}": weight, f"bias{i}": bias})

    def forward(self, x: Tensor) -> Tensor:
        for i in range(self.count):
            x = conv_relu(x, getattr(self, f"weight{i}"), getattr(self, f"bias{i}"), 1)
        return x


class FusedCross(nn.Module):
    """Two library kernels of convolution + bias + ReLU, and one of addition and ReLU."""

    def __init__(self, net: Cross) -> None:
        super().__init__()
        self.left, self.right = net.left, net.right

    def forward(self, x: Tensor) -> Tensor:
        a, b = (conv_relu(x, c.weight, c.bias, c.padding[0]) for c in (self.left, self.right))
        return F.relu(a + b)


class FoldedPair(Held):
    """Depthwise and pointwise convolution with batch norms folded."""

    def __init__(self, net: nn.Sequential) -> None:
        super().__init__()
        (w0, b0), (w1, b1) = folded(net[0], net[1]), folded(net[3], net[4])
        self.hold(w0=w0, b0=b0, w1=w1, b1=b1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu6(F.conv2d(x, self.w0, self.b0, padding=1, groups=x.shape[1]))
        return F.relu6(F.conv2d(x, self.w1, self.b1))


class MergedBert(Held):
    """One Linear for Q, K and V, and the library's attention."""

    def __init__(self, net: BertBlock) -> None:
        super().__init__()
        self.net = net
        parts = (net.query, net.key, net.value)
        self.hold(
            weight=torch.cat([p.weight for p in parts]), bias=torch.cat([p.bias for p in parts])
        )

    def forward(self, x: Tensor) -> Tensor:
        net = self.net
        q, k, v = (net._split(y) for y in F.linear(x, self.weight, self.bias).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        y = net.attention_norm(net.output(mixed) + x)
        return net.norm(net.shrink(F.gelu(net.grow(y))) + y)


def expert(work: Workload) -> nn.Module:
    """The hand-merged version of a row.

    Raises
    ------
    LookupError
        If there is none: whole networks.
    """
    net, name = work.module, work.row.name
    if isinstance(net, ConvSum):
        return ConcatenatedConvs(net) if net.relu else SummedConvs(net)
    if name in ("cbr1", "cbr3", "cbr_map"):
        return FoldedConvs(net)
    if name == "dwpw":
        return FoldedPair(net)
    kinds = {
        DenseNormHeads: MergedDenseNorm, Projections: MergedProjections, Cross: FusedCross, BertBlock: MergedBert,
        LlamaLayer: MergedLlama,
    }  # fmt: skip
    if type(net) in kinds:
        return kinds[type(net)](net)
    if isinstance(net, GeluNorm | nn.ReLU):
        return net  # nothing to merge by hand: the compiler's version is the expert's
    raise LookupError(f"there is no hand-merged version of {name}")
