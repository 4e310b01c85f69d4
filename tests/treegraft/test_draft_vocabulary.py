"""A drafter with a small head says the same of the tokens it has as one with the whole head."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.treegraft.tiny import save_tiny
from treegraft.draft_vocabulary import DRAFT_VOCABULARY, UNKNOWN, DraftVocabulary
from treegraft.drafters.lm import RowStore
from treegraft.errors import UserError
from treegraft.pair import load_models
from treegraft.tree import IntArray

VOCAB = 12
TOKENS: IntArray = np.array([1, 4, 5, 11])


def test_columns_and_tokens_are_each_others_inverse() -> None:
    small = DraftVocabulary(len(TOKENS), TOKENS)
    assert small.of_columns(small.columns_of(TOKENS)).tolist() == TOKENS.tolist()
    others = np.setdiff1d(np.arange(VOCAB + 2), TOKENS)
    assert (small.columns_of(others) == UNKNOWN).all()


def test_scores_are_those_of_the_whole_head_over_the_tokens_it_has() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0))
    masked = torch.full_like(logits, -float("inf"))
    masked[:, TOKENS] = logits[:, TOKENS]
    whole, small = (
        RowStore(DraftVocabulary(VOCAB), 3, 0.7),
        RowStore(DraftVocabulary(len(TOKENS), TOKENS), 3, 0.7),
    )
    rows = whole.append(masked)
    assert small.append(logits[:, TOKENS]).tolist() == rows.tolist()
    for ours, theirs in zip(small.top(rows, 3), whole.top(rows, 3), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    every = np.repeat(rows, VOCAB), np.tile(np.arange(VOCAB), len(rows))
    edges, known = small.edges(*every), np.isin(every[1], TOKENS)
    np.testing.assert_allclose(edges[known], whole.edges(*every)[known], rtol=1e-5)
    assert np.isnan(edges[~known]).all()


def test_a_model_with_a_small_head_is_no_target(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "small", VOCAB)
    (folder / DRAFT_VOCABULARY).write_text(json.dumps(TOKENS.tolist()))
    with pytest.raises(UserError, match=f"can say {len(TOKENS)} of its {VOCAB} tokens only"):
        load_models(("small", folder), [("ngram", None)], "cpu")
    models = load_models(("whole", save_tiny(tmp_path / "whole", VOCAB)), [("small", folder)], "cpu")
    assert models.vocabulary[0].size == len(TOKENS)
