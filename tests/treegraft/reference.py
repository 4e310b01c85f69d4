"""What the decoder is held to, written as simply as it goes: plain decoding without a cache, and caches that hold it.

Nothing here uses the decoder's own sampling, stopping or cache.
"""

from dataclasses import dataclass

import numpy as np
import torch

from treegraft.decoder import GREEDY, Decoder, Generation
from treegraft.drafters import LanguageModelDrafter
from treegraft.models import LanguageModel
from treegraft.runner import ModelRunner
from treegraft.sampling import SamplingSettings


@dataclass(frozen=True)
class PlainText:
    """What plain decoding gives; logits and scores are [len(tokens), vocabulary]."""

    tokens: list[int]
    text: str
    finish: str
    logits: torch.Tensor
    scores: torch.Tensor


def processed(logits: torch.Tensor, text: list[int], sampling: SamplingSettings) -> torch.Tensor:
    """Scores [vocabulary] that a token is chosen from: transformers' processors by their definitions, in its order."""
    scores = logits.clone()
    seen = sorted(set(text))
    penalty = sampling.repetition_penalty
    scores[seen] = torch.where(scores[seen] < 0, scores[seen] * penalty, scores[seen] / penalty)
    if sampling.temperature == 0:
        return scores
    scores /= sampling.temperature
    if sampling.top_k:
        scores[scores < scores.topk(min(sampling.top_k, len(scores))).values[-1]] = -torch.inf
    if sampling.top_p < 1:
        chance, order = scores.softmax(0).sort(descending=True)
        scores[order[chance.cumsum(0) - chance >= sampling.top_p]] = -torch.inf
    chance = scores.softmax(0)
    scores[chance < sampling.min_p * chance.max()] = -torch.inf
    return scores


def decode_plainly(
    model: LanguageModel,
    prompt: list[int],
    max_new_tokens: int,
    sampling: SamplingSettings = GREEDY,
    stop: tuple[str, ...] = (),
    ignore_eos: bool = False,
) -> PlainText:
    """The whole text through the model for every token, one uniform number a sampled token, all of it decoded to see
    whether it holds a stop string."""
    random = np.random.default_rng(sampling.seed)
    emitted: list[int] = []
    logits, scores = [], []
    finish = ""
    while not finish:
        text = prompt + emitted
        with torch.inference_mode():
            logits.append(model.module(torch.tensor([text]), use_cache=False).logits[0, -1])
        scores.append(processed(logits[-1], text, sampling))
        if sampling.temperature == 0:
            emitted.append(int(scores[-1].argmax()))
        else:
            chances = scores[-1].double().softmax(0).cumsum(0).numpy()
            emitted.append(int(np.searchsorted(chances, random.random() * chances[-1], side="right")))
        written = str(model.tokenizer.decode(emitted, skip_special_tokens=True))
        if emitted[-1] in model.eos_token_ids and not ignore_eos:
            finish = "eos"
        elif any(string in written for string in stop):
            finish = "stop"
        elif len(emitted) == max_new_tokens:
            finish = "length"
        elif len(prompt + emitted) == model.context_limit:
            finish = "context"
    cut = min([written.index(string) for string in stop if string in written], default=len(written))
    return PlainText(emitted, written[:cut], finish, torch.stack(logits), torch.stack(scores))


def plain(
    model: LanguageModel, prompt: list[int], count: int, sampling: SamplingSettings = GREEDY, eos: bool = True
) -> list[int]:
    """The tokens of ``decode_plainly``."""
    return decode_plainly(model, prompt, count, sampling, ignore_eos=not eos).tokens


def assert_equal_to_plain(result: Generation, expected: PlainText) -> None:
    """Tokens, text and reason exactly; the recorded logits and scores but for rounding."""
    assert result.tokens == expected.tokens
    assert result.text == expected.text
    assert result.finish == expected.finish
    assert result.logits is not None
    assert result.scores is not None
    torch.testing.assert_close(result.logits, expected.logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(result.scores, expected.scores, rtol=1e-4, atol=1e-3)


def assert_caches_hold(decoder: Decoder, text: list[int], result: Generation | None = None) -> None:
    """Every cache is as long as what was committed, and holds the keys and values of a fresh pass over that text.

    Args:
        text: prompt and emitted tokens; the target has all of them but the last, which it has too where the text ended
            on a drafted token (known once there is a ``result``).
    """
    runners = [drafter.runner for drafter in decoder.drafters if isinstance(drafter, LanguageModelDrafter)]
    ended_on_node = 0
    if result is not None:
        # Every step emits its accepted nodes and a bonus token, but for a last one that ended on a node.
        ended_on_node = sum(result.metrics.accepted_lengths) + result.metrics.steps - len(result.tokens)
        assert 0 <= ended_on_node <= int(result.finish in ("eos", "stop"))
        assert decoder.runner.committed == len(text) - 1 + ended_on_node
    for runner in [decoder.runner, *runners]:
        assert runner.cache.length == runner.committed <= decoder.runner.committed <= len(text)
        assert_cache_holds(runner, text[: runner.committed])


def assert_cache_holds(runner: ModelRunner, text: list[int]) -> None:
    """The first slots of a cache equal transformers' own cache after ``text``."""
    if not text:
        return
    with torch.inference_mode():
        fresh = runner.model.module(torch.tensor([text]), use_cache=True).cache
    for found, expected in zip(runner.cache.tree_layers, fresh.layers, strict=True):
        assert found.keys is not None
        assert found.values is not None
        torch.testing.assert_close(found.keys[:, :, : len(text)], expected.keys, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found.values[:, :, : len(text)], expected.values, rtol=1e-4, atol=1e-4)
