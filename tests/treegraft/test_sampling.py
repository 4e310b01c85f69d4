"""Sampling keeps the target's law under greedily drafted trees: exact enumeration against many samples."""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from tests.treegraft.tiny import tiny_language_model
from treegraft.decoder import Decoder
from treegraft.drafters import Drafter, LanguageModelDrafter, NgramDrafter
from treegraft.errors import UserError
from treegraft.sampling import SamplingSettings, TokenChooser
from treegraft.scheduling.policy import FixedSchedule
from treegraft.settings import DraftSettings
from treegraft.vocabulary import check_vocabularies

VOCAB, LENGTH, PROMPT = 4, 3, [2, 3, 2]
SAMPLES = 1200
CHI_SQUARE_999 = {10: 29.6, 20: 45.3, 30: 59.7, 40: 73.4, 60: 99.6, 80: 124.8, 124: 178.0}  # 99.9 % quantiles


def exact_law(model: torch.nn.Module) -> dict[tuple[int, ...], float]:
    """Probability of every text of LENGTH tokens, by enumeration."""
    processors = LogitsProcessorList(
        [RepetitionPenaltyLogitsProcessor(1.3), TemperatureLogitsWarper(0.7), TopPLogitsWarper(0.9)]
    )
    law = {}
    for text in itertools.product(range(VOCAB), repeat=LENGTH):
        chance = 1.0
        for i, token in enumerate(text):
            ids = torch.tensor([PROMPT + list(text[:i])])
            with torch.inference_mode():
                scores = processors(ids, model(ids).logits[:, -1])  # type: ignore[arg-type]
            chance *= float(torch.softmax(scores.double(), -1)[0, token])
        law[text] = chance
    return law


def test_the_law_of_the_output_is_the_targets() -> None:
    target = tiny_language_model(vocab_size=VOCAB, hidden=16, seed=3, name="target")
    drafter = tiny_language_model(vocab_size=VOCAB, hidden=16, seed=3, layers=1, name="drafter")
    settings = DraftSettings(depth=2, width=2, look_back=2, verified_sizes=(6,))
    members: list[Drafter] = [
        NgramDrafter(0, settings.ngram),
        LanguageModelDrafter(1, drafter, check_vocabularies(target, drafter)),
    ]
    decoder = Decoder(target, members, FixedSchedule((1, 0)), settings, ignore_eos=True)
    counts: Counter[tuple[int, ...]] = Counter()
    accepted = 0
    for seed in range(SAMPLES):
        sampling = SamplingSettings(temperature=0.7, top_p=0.9, repetition_penalty=1.3, seed=seed)
        result = decoder.generate(PROMPT, LENGTH, sampling)
        counts[tuple(result.tokens)] += 1
        accepted += sum(result.metrics.accepted_lengths)
    assert accepted > SAMPLES / 10  # drafts do play a part
    law = exact_law(target.module)
    assert all(law[text] > 0 for text in counts)
    likely = [text for text, chance in law.items() if chance * SAMPLES >= 5]
    rest = 1 - sum(law[text] for text in likely)
    expected = np.array([law[text] for text in likely] + [rest]) * SAMPLES
    observed = np.array([counts[text] for text in likely] + [SAMPLES - sum(counts[text] for text in likely)])
    keep = expected > 1
    chi_square = float((((observed - expected) ** 2) / np.maximum(expected, 1e-9))[keep].sum())
    limit = next(value for degrees, value in CHI_SQUARE_999.items() if degrees >= keep.sum() - 1)
    assert chi_square < limit


def test_the_seed_decides_and_one_number_is_drawn_per_token() -> None:
    logits = torch.log(torch.tensor([0.2, 0.3, 0.5]))
    first, second = (TokenChooser(SamplingSettings(temperature=1.0, seed=7)) for _ in range(2))
    uniform = np.random.default_rng(7).random(20)
    expected = np.searchsorted(np.cumsum([0.2, 0.3, 0.5]), uniform, side="right")
    assert [first.choose(logits, [0]) for _ in range(20)] == expected.tolist()
    assert [second.choose(logits, [0]) for _ in range(20)] == expected.tolist()


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", -1.0), ("top_p", 0.0), ("top_k", -1), ("min_p", 2.0), ("repetition_penalty", 0.0)],
)
def test_settings_outside_their_range_are_refused(name: str, value: float) -> None:
    with pytest.raises(UserError, match=name):
        SamplingSettings(**{name: value})  # type: ignore[arg-type]
