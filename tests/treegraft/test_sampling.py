"""Sampling keeps the target's law under greedily drafted trees: exact enumeration against many samples."""

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chi2  # scikit-learn brings it

from tests.treegraft.reference import processed
from tests.treegraft.tiny import tiny_language_model
from treegraft.decoder import Decoder
from treegraft.drafters import LanguageModelDrafter
from treegraft.errors import UserError
from treegraft.models import LanguageModel
from treegraft.sampling import SamplingSettings, TokenChooser
from treegraft.scheduling.policy import never
from treegraft.settings import DraftSettings
from treegraft.vocabulary import check_vocabularies

VOCAB, LENGTH, PROMPT = 5, 3, [0, 3, 2, 0, 3]
SAMPLES = 20_000
SAMPLING = SamplingSettings(temperature=0.7, top_p=0.9, repetition_penalty=1.3)


def exact_law(model: LanguageModel) -> dict[tuple[int, ...], float]:
    """Probability of every text of LENGTH tokens, by enumeration."""
    law = {}
    for text in itertools.product(range(VOCAB), repeat=LENGTH):
        chance = 1.0
        for i, token in enumerate(text):
            before = PROMPT + list(text[:i])
            with torch.inference_mode():
                logits = model.module(torch.tensor([before])).logits[0, -1]
            chance *= float(processed(logits, before, SAMPLING).double().softmax(0)[token])
        law[text] = chance
    return law


def remember(model: LanguageModel) -> LanguageModel:
    """The same model, which computes a forward once and then repeats it.

    A forward is a function of its inputs and of the cache's contents: both, bit by bit, are what it is remembered by.
    """
    known: dict[tuple[bytes, ...], tuple[Any, list[Any]]] = {}
    forward = model.module.forward

    def remembering(**inputs: Any) -> Any:
        layers, length = inputs["cache"].tree_layers, inputs["cache"].length
        states = [x[:, :, :length] for layer in layers if length for x in (layer.keys, layer.values)]
        names = ("input_ids", "position_ids", "attention_mask", "logits_to_keep")
        key = tuple(x.numpy().tobytes() for x in [*(inputs[name] for name in names), *states])
        if key in known:
            output, added = known[key]
            for layer, (keys, values) in zip(layers, added, strict=True):
                layer.update(keys, values)
            return output
        output = forward(**inputs)
        end = inputs["cache"].length
        added = [(layer.keys[:, :, length:end].clone(), layer.values[:, :, length:end].clone()) for layer in layers]
        known[key] = output, added
        return output

    model.module.forward = remembering
    return model


def test_the_law_of_the_output_is_the_targets() -> None:
    target = tiny_language_model(VOCAB, 1, 8, 2, seed=9, name="target")
    law = exact_law(target)
    drafter = tiny_language_model(VOCAB, 1, 8, 2, seed=8, name="drafter")
    settings = DraftSettings(depth=2, width=2, look_back=2, verified_sizes=(6,))
    greedy = LanguageModelDrafter(0, remember(drafter), check_vocabularies(target, drafter))
    decoder = Decoder(remember(target), [greedy], never(), settings, ignore_eos=True)
    counts: Counter[tuple[int, ...]] = Counter()
    accepted: Counter[int] = Counter()
    for seed in range(SAMPLES):
        result = decoder.generate(PROMPT, LENGTH, replace(SAMPLING, seed=seed))
        counts[tuple(result.tokens)] += 1
        accepted.update(result.metrics.accepted_lengths)
    assert min(accepted[length] for length in range(LENGTH)) > SAMPLES / 20  # drafts play every part
    assert all(law[text] > 0 for text in counts)
    # Pearson's statistic wants at least five expected in a cell; the texts that are rarer share one.
    likely = [text for text, chance in law.items() if chance * SAMPLES >= 5]
    expected = np.array([law[text] for text in likely]) * SAMPLES
    observed = np.array([counts[text] for text in likely])
    rest, seen = SAMPLES - expected.sum(), SAMPLES - observed.sum()
    statistic = float(((observed - expected) ** 2 / expected).sum()) + (seen - rest) ** 2 / max(rest, 1.0)
    degrees = len(likely) - (rest < 1)
    assert degrees > 8
    assert statistic < chi2.ppf(0.999, degrees)


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
