"""The tokens that a drafter model can propose: often far fewer than the target has.

On a small drafter the head is as dear as its layers. A drafter folder may name the tokens that are worth their head
rows (`draft_vocabulary.json`); the others are never proposed by it, and it leaves the scores of nodes that hold them
as they are. The output does not change: the target has the last word on every token. The idea is that of FR-Spec
(Zhao et al. 2025, arXiv:2502.14856).
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from treegraft.errors import UserError
from treegraft.tree import IntArray

DRAFT_VOCABULARY = "draft_vocabulary.json"
UNKNOWN = -1


@dataclass(frozen=True)
class DraftVocabulary:
    """What the columns of a drafter's logits stand for.

    Attributes:
        size: columns that count; later ones are padding.
        tokens: int64 [size], ascending: the token of each column; None: column i is token i.
    """

    size: int
    tokens: IntArray | None = None

    def of_columns(self, columns: IntArray) -> IntArray:
        """The tokens of some columns, same shape."""
        return columns if self.tokens is None else self.tokens[columns]

    def columns_of(self, tokens: IntArray) -> IntArray:
        """The columns of some tokens, int64 of the same shape; UNKNOWN where the drafter has none."""
        if self.tokens is None:
            return np.where(tokens < self.size, tokens, UNKNOWN)
        found = np.minimum(np.searchsorted(self.tokens, tokens), self.size - 1)
        return np.where(self.tokens[found] == tokens, found, UNKNOWN)


def read_draft_vocabulary(folder: Path, name: str, vocab_size: int) -> IntArray | None:
    """The draft vocabulary of a model folder, None if it names none; UserError for a damaged file."""
    file = folder / DRAFT_VOCABULARY
    if not file.is_file():
        return None
    try:
        tokens = np.array(json.loads(file.read_text()), np.int64)
        sound = tokens.ndim == 1 and len(tokens) > 0 and bool((np.diff(tokens) > 0).all())
    except (ValueError, TypeError, OverflowError):
        sound = False
    if not sound or tokens[0] < 0 or tokens[-1] >= vocab_size:
        raise UserError(
            f"model '{name}': {file} is not an ascending list of token ids below {vocab_size}; "
            "build the drafter again with `pipeline draft`"
        )
    return tokens


def restrict_head(module: PreTrainedModel, tokens: IntArray) -> None:
    """Keep only the head's rows for ``tokens`` (int64 [n]), in this order, in place; the embedding stays whole."""
    head = module.get_output_embeddings()
    assert isinstance(head, nn.Linear)
    rows = torch.from_numpy(tokens).to(head.weight.device)
    made = nn.Linear(head.in_features, len(tokens), bias=head.bias is not None, device="meta")
    made.weight = nn.Parameter(head.weight.detach()[rows], requires_grad=False)
    if head.bias is not None:
        made.bias = nn.Parameter(head.bias.detach()[rows], requires_grad=False)
    module.set_output_embeddings(made)
