"""Attention layers as PyTorch models write them. Importing this module needs PyTorch.

Inputs and results are ``[batch, length, hidden]``; heads have ``hidden / heads`` places.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

#: How queries, keys and values are taken from the result of one layer.
JOINT = ("split", "chunk", "unbind", "index", "heads")

#: How models build a mask that hides what comes later.
CAUSAL = ("where", "arange", "multiplied", "triu", "clamped", "filled", "boolean")


def causal_scores(scores: torch.Tensor, kind: str) -> torch.Tensor:
    """Hide later keys in one of the ways of ``CAUSAL``, all of which are constants once exported."""
    length = scores.shape[-1]
    lowest = torch.finfo(scores.dtype).min
    places = torch.arange(length)
    if kind == "where":  # GPT-2
        seen = torch.tril(torch.ones(length, length)).bool()[None, None]
        return torch.where(seen, scores, torch.full([], lowest))
    if kind == "arange":
        return torch.where(places[None] <= places[:, None], scores, lowest)
    if kind == "multiplied":  # LLaMA before transformers 4.48
        mask = torch.full((length, length), lowest) * (places > places[:, None])
        return scores + mask[None, None].expand(scores.shape[0], 1, -1, -1)
    if kind == "triu":
        return scores + torch.triu(torch.full((length, length), float("-inf")), 1)
    if kind == "clamped":  # OPT
        mask = torch.triu(torch.full((length, length), lowest), 1)
        return torch.maximum(scores + mask, torch.tensor(lowest))
    if kind == "filled":
        return scores.masked_fill(places > places[:, None], -1e4)
    # A mask of truth values by comparisons, combined, then selected from: transformers 5.
    seen = (places[None] <= places[:, None]) & (places[None] >= 0)
    seen = seen[None, None].expand(scores.shape[0], 1, -1, -1)
    return scores + torch.where(seen, 0.0, lowest)


class JointAttention(nn.Module):
    """Self-attention whose queries, keys and values are one layer's result.

    Parameters
    ----------
    form : str
        One of ``JOINT``.
    mask : str or None
        One of ``CAUSAL``.
    heads, hidden : int
        Sizes.
    """

    def __init__(
        self, form: str = "split", mask: str | None = None, heads: int = 2, hidden: int = 64
    ) -> None:
        super().__init__()
        self.form, self.mask, self.heads = form, mask, heads
        self.joint = nn.Linear(hidden, 3 * hidden)
        self.output = nn.Linear(hidden, hidden)

    def operands(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values, ``[batch, heads, length, width]``."""
        batch, length, hidden = x.shape
        made, width = self.joint(x), hidden // self.heads
        if self.form == "heads":  # GPT-NeoX: each head's three beside each other
            return made.view(batch, length, self.heads, -1).transpose(1, 2).chunk(3, -1)
        if self.form in ("unbind", "index"):  # ViT
            made = made.reshape(batch, length, 3, self.heads, width).permute(2, 0, 3, 1, 4)
            return made.unbind(0) if self.form == "unbind" else (made[0], made[1], made[2])
        parts = made.split(hidden, dim=2) if self.form == "split" else made.chunk(3, -1)
        return tuple(p.view(batch, length, self.heads, width).transpose(1, 2) for p in parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention and its output layer."""
        q, k, v = self.operands(x)
        return self.output(self.merged(q, k, v))

    def merged(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention of heads, with heads side by side."""
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        if self.mask is not None:
            scores = causal_scores(scores, self.mask)
        mixed = torch.softmax(scores, -1) @ v
        return mixed.transpose(1, 2).reshape(q.shape[0], q.shape[2], -1)


class CachedAttention(JointAttention):
    """One step of a decoder: keys and values follow those of earlier steps.

    Parameters
    ----------
    returns : bool
        Whether the longer keys and values are results too.
    """

    def __init__(self, returns: bool = True, **sizes: int) -> None:
        super().__init__(**sizes)
        self.returns = returns

    def forward(self, x, past_keys, past_values):
        """Attention over ``[batch, heads, past, width]`` and the new places."""
        q, k, v = self.operands(x)
        k, v = torch.cat([past_keys, k], 2), torch.cat([past_values, v], 2)
        result = self.output(self.merged(q, k, v))
        return (result, k, v) if self.returns else result


class Upcast(nn.Module):
    """Attention of float16 operands that is partly computed in float32.

    Parameters
    ----------
    kind : str
        ``"softmax"``, ``"products"`` (of queries and keys), ``"turned"`` (keys after their transpose), ``"values"`` or
        ``"all"``.
    """

    KINDS = ("softmax", "products", "turned", "values", "all")

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention of ``[batch, heads, length, width]``."""
        if self.kind == "softmax":
            scores = q @ k.transpose(-1, -2) / 8
            return torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype) @ v
        if self.kind == "values":
            scores = (q @ k.transpose(-1, -2)).float() / 8
            return (torch.softmax(scores, -1) @ v.float()).to(q.dtype)
        turned = (
            k.transpose(-1, -2).float() if self.kind == "turned" else k.float().transpose(-1, -2)
        )
        weights = torch.softmax(q.float() @ turned / 8, -1)
        if self.kind == "all":
            return (weights @ v.float()).to(q.dtype)
        return weights.to(q.dtype) @ v


class Block(nn.Module):
    """Transformer block with dropout, normed before or after its halves.

    Parameters
    ----------
    before : bool
        Whether norms come first (GPT-2) or follow the sums (BERT).
    mask : str or None
        One of ``CAUSAL``.
    """

    def __init__(self, before: bool, mask: str | None = None, hidden: int = 64) -> None:
        super().__init__()
        self.before = before
        self.attention = JointAttention(mask=mask, hidden=hidden)
        self.norms = nn.ModuleList([nn.LayerNorm(hidden) for _ in range(2)])
        self.dropout = nn.Dropout(0.1)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        """Two layers with a GELU between them."""
        return self.down(functional.gelu(self.up(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention and feed-forward network, each with its residual."""
        for norm, half in zip(self.norms, (self.attention, self.feed_forward), strict=True):
            inner = self.dropout(half(norm(x) if self.before else x))
            x = x + inner if self.before else norm(x + inner)
        return x
