"""A net that uses one weight in its embedding and its output layer, and returns a dict."""

import torch
from torch import nn


class Tied(nn.Module):
    """Token embedding, two residual linear layers, and logits through the embedding's own weight."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        """Shape (batch, tokens) to logits (batch, tokens, vocabulary) and hidden (batch, tokens, width)."""
        hidden = self.embedding(tokens)
        hidden = hidden + torch.tanh(self.first(hidden))
        hidden = self.norm(hidden + torch.tanh(self.second(hidden)))
        return {"logits": self.head(hidden), "hidden": hidden}


def tied(
    batch: int = 1, seq_len: int = 16, vocabulary: int = 2000, width: int = 128
) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A net with a tied weight and a dict output.

    Args:
        batch: sequences, shape (batch, seq_len), int64.
        seq_len: tokens a sequence.
        vocabulary: rows of the tied weight.
        width: columns of the tied weight.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Tied(vocabulary, width).eval(), (torch.randint(vocabulary, (batch, seq_len)),)
