"""A decoder layer of LLaMA (Touvron et al., 2023) as a PyTorch module, and as an expert would merge it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RmsNorm(nn.Module):
    """Root mean square norm, in float32 at least (Zhang and Sennrich, 2019)."""

    def __init__(self, hidden: int, epsilon: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return self.weight * wide.to(x.dtype)


class LlamaLayer(nn.Module):
    """Norm, causal attention with rotary embedding, residual; norm, SwiGLU, residual. No biases.

    The sizes are those of LLaMA-7B by default. ``library_attention`` takes PyTorch's attention;
    without it attention is written out, which is what is exported for this project (equal
    mathematics).
    """

    def __init__(
        self, tokens: int = 512, hidden: int = 4096, heads: int = 32, inner: int = 11008
    ) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.ffn_norm = RmsNorm(hidden), RmsNorm(hidden)
        self.query, self.key, self.value, self.output = (
            nn.Linear(hidden, hidden, bias=False) for _ in range(4)
        )
        self.gate, self.up = (nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, hidden, bias=False)
        width = hidden // heads
        rates = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
        angles = torch.outer(torch.arange(tokens, dtype=torch.float64), rates).repeat(1, 2)
        self.register_buffer("cos", angles.cos().float())
        self.register_buffer("sin", angles.sin().float())
        mask = torch.full((tokens, tokens), -torch.inf).triu(1)
        self.register_buffer("mask", mask, persistent=False)
        self.library_attention = True

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.output(self.mixed(self.query(y), self.key(y), self.value(y)))
        y = self.ffn_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

    def mixed(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention over the heads of ``[batch, tokens, hidden]``."""
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (query, key, value))
        q, k = self.rotated(q), self.rotated(k)
        if self.library_attention:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = torch.matmul(q, k.transpose(-1, -2)) * q.shape[-1] ** -0.5
            y = torch.matmul(torch.softmax(scores + self.mask, -1), v)
        return y.transpose(1, 2).flatten(2)

    def rotated(self, x: Tensor) -> Tensor:
        """Rotary embedding (Su et al., 2021), halves as in the published weights."""
        first, second = x.chunk(2, -1)
        return x * self.cos + torch.cat((-second, first), -1) * self.sin


class MergedLlama(nn.Module):
    """One Linear for Q, K and V, one for gate and up, and the library's attention."""

    def __init__(self, net: LlamaLayer) -> None:
        super().__init__()
        self.net = net
        parts = (net.query.weight, net.key.weight, net.value.weight)
        self.register_buffer("qkv", torch.cat(parts).detach().clone())
        both = torch.cat((net.gate.weight, net.up.weight))
        self.register_buffer("gate_up", both.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        net = self.net
        x = x + net.output(net.mixed(*F.linear(net.norm(x), self.qkv).chunk(3, -1)))
        gate, up = F.linear(net.ffn_norm(x), self.gate_up).chunk(2, -1)
        return x + net.down(F.silu(gate) * up)
