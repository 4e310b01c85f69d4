"""Faults that were reported against other systems of this kind, each made impossible; a test is named after its fault.

What other files hold already is not repeated here: recurrent models and vocabularies (test_models, test_vocabulary),
the law of sampled text (test_sampling), the verified size (test_tree), random combinations (test_engine_properties).
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from pipeline.evaluate import measure
from pipeline.hf_methods import hf_methods
from pipeline.methods import timed
from pipeline.prompts import Prompt
from tests.treegraft.reference import (
    assert_cache_holds,
    assert_caches_hold,
    assert_equal_to_plain,
    decode_plainly,
    plain,
    processed,
)
from tests.treegraft.test_decoder import CHEAP, SETTINGS, TARGET, VOCAB, RandomScheduler, drafters
from tests.treegraft.tiny import cost_model, save_tiny, tiny_language_model
from treegraft.costs import LatencyCurve
from treegraft.decoder import Decoder
from treegraft.drafters import Drafter, LanguageModelDrafter, NgramDrafter
from treegraft.models import LanguageModel, load_model
from treegraft.runner import ModelRunner
from treegraft.sampling import SamplingSettings, TokenChooser
from treegraft.scheduling.policy import FixedSchedule, Scheduler, always, never
from treegraft.settings import DraftSettings
from treegraft.stopping import StopChecker
from treegraft.tree import DraftTree, IntArray
from treegraft.verification import verify, walk
from treegraft.vocabulary import check_vocabularies

PROMPT = [2, 9, 4]
FULL = plain(TARGET, PROMPT, 40, eos=False)
SPAN = 5
DEEP = DraftSettings(verified_sizes=(2 * SPAN,))
SAMPLED = SamplingSettings(temperature=0.8, top_k=12, top_p=0.95, min_p=0.01, repetition_penalty=1.3, seed=5)


class Knowing:
    """Knows what the target will write (``answer``): drafts ``lengths[step]`` right tokens, then a wrong one.

    So the accepted length of every step is known beforehand; the lengths are taken in turn.
    """

    name, index, tokens_processed, hits = "knowing", 0, 0, 0.5

    def __init__(self, answer: list[int], lengths: tuple[int, ...] = (SPAN,)) -> None:
        self.answer = answer
        self.lengths = lengths

    def begin(self, prompt: IntArray, capacity: int) -> None:
        self.at = self.step = 0

    def draft(self, tree: DraftTree, settings: DraftSettings, layer: int, max_depth: int) -> None:
        if layer > 1:
            return
        right = self.lengths[self.step % len(self.lengths)]
        node = 0
        for i, token in enumerate(self.answer[self.at : self.at + min(right + 1, max_depth)]):
            drafted = token if i < right else (token + 1) % VOCAB
            node = int(tree.add(np.array([node]), np.array([drafted]), np.array([-0.1]), 0, 1)[0])

    def commit(self, tree: DraftTree, accepted: IntArray, tokens: IntArray, alternatives: IntArray) -> None:
        self.at += len(tokens)
        self.step += 1


def schedulers(m: int) -> Iterator[Scheduler]:
    """Never, every fixed choice of one drafter, the first and the last layer alone, random."""
    yield never()
    for drafter in range(1, m):
        yield always(SETTINGS.depth, drafter)
        yield FixedSchedule((drafter,))
        yield FixedSchedule((0, 0, drafter))
    yield from map(RandomScheduler, range(3))


def transformers_step(model: LanguageModel, text: list[int], sampling: SamplingSettings) -> tuple[Any, Any]:
    """(logits, scores) [vocabulary] of the token after ``text``, by transformers' own ``generate``."""
    config = GenerationConfig(
        max_new_tokens=1,
        do_sample=sampling.temperature > 0,
        temperature=sampling.temperature or None,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p or None,
        repetition_penalty=sampling.repetition_penalty,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
        output_scores=True,
    )
    ids = torch.tensor([text])
    out: Any = model.module.generate(  # type: ignore[operator]
        ids, attention_mask=torch.ones_like(ids), generation_config=config
    )
    return out.logits[0][0], out.scores[0][0]


# 1: a prompt of one token, assisted output differs


@pytest.mark.parametrize("kinds", ["n", "a", "nar", "to"])
def test_one_token_prompt(kinds: str) -> None:
    """Nothing to prefill, no text before the root: every token as the prompt, answers of one token and of more."""
    decoder = Decoder(TARGET, drafters(kinds), RandomScheduler(0), SETTINGS, ignore_eos=True)
    for token in range(VOCAB):
        count = 1 + token % 7
        result = decoder.generate([token], count, record=True)
        assert_equal_to_plain(result, decode_plainly(TARGET, [token], count, ignore_eos=True))
        assert_caches_hold(decoder, [token, *result.tokens], result)


# 2: half precision differs from plain decoding


def test_bf16_divergences_are_counted_with_their_logit_gap(tmp_path: Path) -> None:
    """No equality is claimed in bf16. Where the texts part, all before is equal and the gap is of rounding's size."""
    target = tiny_language_model(VOCAB, seed=1, dtype=torch.bfloat16, name="target")
    members = drafters("no")
    plainly = Decoder(target, [], never(), SETTINGS, ignore_eos=True)
    drafting = Decoder(target, members, always(3), SETTINGS, ignore_eos=True)
    parted, starts = 0, range(2, VOCAB, 2)
    for first in starts:
        one, other = (each.generate([first, 3], 30, record=True) for each in (plainly, drafting))
        assert one.logits is not None
        assert other.logits is not None
        at = next((i for i, pair in enumerate(zip(one.tokens, other.tokens, strict=True)) if pair[0] != pair[1]), None)
        if at is not None:
            parted += 1
            # The same text before: each computation preferred its own token, so the two logits lie within the rounding.
            rounding = (one.logits[at].float() - other.logits[at].float()).abs().max()
            gap = one.logits[at, one.tokens[at]].float() - one.logits[at, other.tokens[at]].float()
            assert 0 <= gap <= 2 * rounding
            assert rounding < 0.2  # and not another text's logits
    assert parted <= len(starts) / 2

    def method(tokens: list[int]) -> Any:
        return lambda prompt, sampling: {"tokens": len(tokens), "token_ids": tokens, "text": ""}

    texts = {"plain": FULL, "same": FULL, "other": [*FULL[:6], (FULL[6] + 1) % VOCAB], "short": FULL[:9]}
    bench: Any = SimpleNamespace(
        config=SimpleNamespace(evaluate=SimpleNamespace(repeats=1), seed=0), models=SimpleNamespace(target=TARGET)
    )
    prompt = Prompt("p", "kind", ("w2 w9 w4",))
    methods = {name: method(tokens) for name, tokens in texts.items()}
    found = measure(bench, methods, [prompt], 0.0, tmp_path / "turns.jsonl")
    rows = {row["method"]: row["divergence"] for row in found}
    chat = TARGET.tokenizer.apply_chat_template([{"role": "user", "content": "w2 w9 w4"}], return_dict=False)
    logits = decode_plainly(TARGET, [*chat, *FULL[:6]], 1).logits[0]
    apart = abs(float(logits[FULL[6]] - logits[(FULL[6] + 1) % VOCAB]))
    assert rows["plain"] is None
    assert rows["same"] is None
    assert rows["other"] == {"token": 6, "logit_gap": pytest.approx(apart, abs=1e-4)}
    assert rows["short"] == {"token": 9, "logit_gap": None}


# 3: the drafter's cache is trimmed too far (or not far enough) and acceptance decays


@pytest.mark.parametrize("kinds", ["na", "nt", "tr", "naot"])
def test_drafter_cache_after_every_step(kinds: str) -> None:
    """For all schedules, full and partial acceptance: caches hold the text, and no token went through a model twice."""

    class Counting(LanguageModelDrafter):
        """Counts the tree nodes that it processed in vain."""

        wasted = 0

        def begin(self, prompt: IntArray, capacity: int) -> None:
            super().begin(prompt, capacity)
            self.wasted = 0

        def commit(self, tree: DraftTree, accepted: IntArray, tokens: IntArray, alternatives: IntArray) -> None:
            on_path = np.isin(np.arange(tree.size), [0, *accepted])
            self.wasted += int((tree.row[self.index, : tree.size] >= 0)[~on_path].sum())
            super().commit(tree, accepted, tokens, alternatives)

    members = [
        Counting(drafter.index, drafter.model, drafter.vocabulary)
        if isinstance(drafter, LanguageModelDrafter)
        else drafter
        for drafter in drafters(kinds)
    ]
    counting = [drafter for drafter in members if isinstance(drafter, Counting)]
    seen: set[int] = set()
    for scheduler in schedulers(len(kinds)):
        decoder = Decoder(TARGET, members, scheduler, SETTINGS, ignore_eos=True)
        text = [3, 7, 3, 7, 5]

        def check(tokens: list[int], text: list[int] = text, decoder: Decoder = decoder) -> None:
            text += tokens
            seen.add(len(tokens) - 1)
            assert_caches_hold(decoder, text)
            assert decoder.runner.committed == len(text) - 1
            for drafter in counting:
                assert drafter.tokens_processed == drafter.runner.committed + drafter.wasted

        decoder.generate(text.copy(), 12, on_tokens=check)
    assert seen >= {0, 1}
    if "t" in kinds:
        assert SETTINGS.depth in seen  # full acceptance


def test_acceptance_of_a_perfect_drafter_does_not_decay() -> None:
    """A hundred full steps: the drafter lacks one token after each, no more."""
    members = drafters("nt")
    strong = members[1]
    assert isinstance(strong, LanguageModelDrafter)
    decoder = Decoder(TARGET, members, always(3), SETTINGS, ignore_eos=True)
    lags: list[int] = []
    result = decoder.generate(
        PROMPT, 4 * 100, on_tokens=lambda tokens: lags.append(decoder.runner.committed - strong.runner.committed)
    )
    assert result.metrics.accepted_lengths == [3] * 100
    assert lags == [1] * 100


# 5, 6: a cache that cannot be cropped; state kept across requests


def test_a_cropped_cache_goes_on_as_a_fresh_one() -> None:
    """Cut at any length, also back over a move to larger buffers, and filled with other tokens."""
    random = np.random.default_rng(0)
    text, other = random.integers(0, VOCAB, 300), random.integers(0, VOCAB, 40)
    runner = ModelRunner(TARGET)
    for length in (299, 257, 256, 100, 1, 0):
        runner.reset(8)
        runner.prefill(text)
        runner.cache.truncate(length)
        runner.committed = length
        logits = runner.prefill(other, 0)
        mixed = [*text[:length].tolist(), *other.tolist()]
        assert runner.cache.length == runner.committed == len(mixed)
        with torch.inference_mode():
            expected = TARGET.module(torch.tensor([mixed])).logits[0, -len(other) :]
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        assert_cache_holds(runner, mixed)


@pytest.mark.parametrize("kinds", ["n", "na", "nr", "no"])
def test_no_state_is_kept_across_requests(kinds: str) -> None:
    """A request's text, acceptance and work are those of a fresh decoder, whatever came before: a longer request, a
    shorter one, one that was broken off, one in which other tokens were likely."""
    random = np.random.default_rng(1)
    long, repeated = random.integers(0, VOCAB, 280).tolist(), [5, 6, 7] * 5

    def fresh() -> Decoder:
        return Decoder(TARGET, drafters(kinds), FixedSchedule((0, len(kinds) - 1)), SETTINGS, ignore_eos=True)

    def work(decoder: Decoder, prompt: list[int], count: int) -> tuple[Any, ...]:
        result = decoder.generate(prompt, count)
        metrics = result.metrics
        assert_caches_hold(decoder, prompt + result.tokens, result)
        return result.tokens, metrics.accepted_lengths, metrics.verified_nodes, metrics.calls, metrics.processed

    requests = [(repeated, 12), (long, 8), (PROMPT, 12), (long, 8), (repeated, 12)]
    expected = {count: work(fresh(), prompt, count) for prompt, count in [(repeated, 12), (long, 8)]}
    expected_short = work(fresh(), PROMPT, 12)
    used = fresh()

    def break_off(tokens: list[int]) -> None:
        raise KeyboardInterrupt

    for number, (prompt, count) in enumerate(requests):
        if number == 3:
            with pytest.raises(KeyboardInterrupt):
                used.generate([7, 5, 6, 7], 9, on_tokens=break_off)
        assert work(used, prompt, count) == (expected_short if prompt == PROMPT else expected[count])


# 7: shapes when accepted lengths vary


def test_accepted_lengths_vary() -> None:
    lengths = (0, 3, 1, 5, 0, 0, 4, 2)
    decoder = Decoder(TARGET, [Knowing(FULL, lengths)], never(), DEEP, ignore_eos=True)
    count = sum(lengths) + len(lengths)
    text = list(PROMPT)

    def check(tokens: list[int]) -> None:
        text.extend(tokens)
        assert_caches_hold(decoder, text)

    result = decoder.generate(PROMPT, count, on_tokens=check, record=True)
    assert result.metrics.accepted_lengths == list(lengths)
    assert_equal_to_plain(result, decode_plainly(TARGET, PROMPT, count, ignore_eos=True))
    assert_caches_hold(decoder, text, result)


# 8, 16: stops inside a long accepted span


def assert_stopped_at(place: int, decoder: Decoder, stop: tuple[str, ...], finish: str) -> None:
    """Steps draft SPAN right tokens; the text ends with token ``place``, whatever the span held behind it."""
    heard: list[int] = []
    calls = []

    def hear(tokens: list[int]) -> None:
        heard.extend(tokens)
        calls.append(len(tokens))

    result = decoder.generate(PROMPT, 40, stop=stop, on_tokens=hear, record=True)
    assert_equal_to_plain(result, decode_plainly(decoder.target, PROMPT, 40, stop=stop))
    full_steps, inside = divmod(place, SPAN + 1)
    accepted = [SPAN] * full_steps + [min(inside + 1, SPAN)]  # the token behind SPAN nodes is the bonus, not counted
    assert result.finish == finish
    assert heard == result.tokens == FULL[: place + 1]
    assert calls == [SPAN + 1] * full_steps + [inside + 1]
    assert len(result.alternatives) == place + 1
    metrics = result.metrics
    assert metrics.tokens == place + 1
    assert metrics.accepted_lengths == accepted
    assert metrics.steps == full_steps + 1
    assert metrics.accepted_by_depth == [sum(a > depth for a in accepted) for depth in range(max(accepted))]
    assert_caches_hold(decoder, PROMPT + result.tokens, result)


def test_stop_string_early_in_a_span() -> None:
    """Every place of a span, for strings within a token, over the border of two and over three."""
    text = str(TARGET.tokenizer.decode(FULL))
    ends = np.cumsum([len(f" w{token}") for token in FULL])
    target = replace(TARGET, eos_token_ids=())
    for place in range(2, 20):
        end, width = int(ends[place]), len(f" w{FULL[place]}")
        for start, stop_at in ((end - width + 1, end), (end - width - 1, end - 1), (end - width - 4, end)):
            string = text[start:stop_at]
            first = int(np.searchsorted(ends, text.index(string) + len(string)))
            decoder = Decoder(target, [Knowing(FULL)], never(), DEEP)
            assert_stopped_at(first, decoder, ("never written", string), "stop")


def test_eos_early_in_a_span_is_counted_once_and_nothing_behind_it() -> None:
    for eos in set(FULL):
        decoder = Decoder(replace(TARGET, eos_token_ids=(eos,)), [Knowing(FULL)], never(), DEEP)
        assert_stopped_at(FULL.index(eos), decoder, (), "eos")


def test_stop_string_with_textless_tokens_inside_it() -> None:
    """Special tokens have no text; however many of them lie inside a stop string, it is one."""
    for silent in (0, 1, 15, 16, 17, 60):
        checker = StopChecker((), 200, stop=(" w3 w4",), tokenizer=TARGET.tokenizer)
        assert {checker.add(token) for token in [2, 3, *[0] * silent]} == {None}
        assert checker.add(4) == "stop"
        assert checker.text() == " w2"


@pytest.mark.parametrize(
    ("stop", "tokens", "left"),
    [
        ("<s>", [4, 0], " w4"),
        ("w4<s> w5", [3, 4, 0, 5], " w3 "),
        ("w4</s", [2, 3, 4, 1], " w2 w3 "),
        ("<s>", [0], ""),
        ("s>", [6, 0], " w6"),
    ],
)
def test_stop_string_with_a_special_token_in_it(stop: str, tokens: list[int], left: str) -> None:
    """As in transformers, where stop strings are looked for among special tokens too; and cut as any other."""
    checker = StopChecker((), 200, stop=("never written", stop), tokenizer=TARGET.tokenizer)
    *before, last = tokens
    assert {checker.add(token) for token in before} <= {None}
    assert checker.add(last) == "stop"
    assert checker.text() == left


# 9: the wrong finish reason


@pytest.mark.parametrize("reasons", [int(bits) for bits in range(1, 16)])
def test_finish_reason_when_several_hold_at_once(reasons: int) -> None:
    """At one and the same token: EOS, then stop string, then length, then the context's end."""
    eos, stops, length, context = (bool(reasons >> bit & 1) for bit in range(4))
    place = next(i for i in range(8, 40) if FULL.index(FULL[i]) == i)
    target = replace(
        TARGET,
        eos_token_ids=(FULL[place],) if eos else (),
        context_limit=len(PROMPT) + place + 1 if context else 512,
    )
    stop = (f"w{FULL[place]}",) if stops else ()
    assert f"w{FULL[place]}" not in str(TARGET.tokenizer.decode(FULL[:place]))
    first = next(
        name
        for name, holds in zip(("eos", "stop", "length", "context"), (eos, stops, length, context), strict=True)
        if holds
    )
    for kinds, members in (("", []), ("knowing", [Knowing(FULL)]), ("na", drafters("na"))):
        decoder = Decoder(target, members, always(3) if kinds == "na" else never(), DEEP)
        result = decoder.generate(PROMPT, place + 1 if length else 100, stop=stop)
        assert (result.tokens, result.finish) == (FULL[: place + 1], first), kinds


# 10: the context's end, and a drafter whose context is shorter


@pytest.mark.parametrize("length", [1, 2, 9, 13, 15])
def test_no_model_goes_beyond_its_context(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    """Prompts up to one token below the target's 16; a drafter with room for all of it, for less, and for nothing."""
    largest: dict[str, int] = {}  # position that each model was given
    forward = ModelRunner.forward

    def watched(runner: ModelRunner, tokens: IntArray, positions: IntArray, *others: Any) -> torch.Tensor:
        largest[runner.model.name] = max(largest.get(runner.model.name, -1), *positions.tolist())
        return forward(runner, tokens, positions, *others)

    monkeypatch.setattr(ModelRunner, "forward", watched)
    target = tiny_language_model(VOCAB, seed=1, max_position_embeddings=16, name="target")
    prompt = [2 + i % 5 for i in range(length)]
    expected = decode_plainly(replace(TARGET, context_limit=16), prompt, 100, ignore_eos=True)
    for limit in (1, 2, 3, 8, 12, 15, 16, 512):
        near = tiny_language_model(VOCAB, 1, seed=1, max_position_embeddings=limit, name=f"near-{limit}")
        members: list[Drafter] = [
            NgramDrafter(0, SETTINGS.ngram),
            LanguageModelDrafter(1, near, check_vocabularies(target, near)),
        ]
        for scheduler in (always(3), RandomScheduler(limit)):
            decoder = Decoder(target, members, scheduler, SETTINGS, ignore_eos=True)
            result = decoder.generate(prompt, 100, record=True)
            assert_equal_to_plain(result, expected)
            assert_caches_hold(decoder, prompt + result.tokens, result)
        assert largest.get(near.name, -1) < limit
        assert (near.name in largest) == (length <= min(limit, 14))  # wherever it can help, it is asked
    assert largest["target"] == 16 - 2  # the last token is emitted, not processed


# 12: penalties ignored, or moved by rejected drafts


def test_penalties_along_every_tree_path_are_transformers_own() -> None:
    """A tree of all texts of two tokens out of four: at each node the scores of transformers after that very path."""
    tokens = [3, 5, 7, 9]
    tree = DraftTree(PROMPT[-1], 1)
    level = tree.add(np.zeros(4, np.int64), np.array(tokens), np.full(4, -1.0), 0, 1)
    tree.add(np.repeat(level, 4), np.tile(tokens, 4), np.full(16, -1.0), 0, 2)
    nodes = np.arange(1, tree.size)
    runner = ModelRunner(TARGET)
    runner.prefill(np.array(PROMPT[:-1]))
    logits = verify(runner, tree, nodes)

    class Forced(TokenChooser):
        """Computes scores as ever and takes the path that it is told."""

        path: list[int]

        def choose(self, logits: torch.Tensor, text: list[int]) -> int:
            super().choose(logits, text)
            return self.path.pop(0)

    for leaf in range(1 + 4, tree.size):
        chooser = Forced(SAMPLED, record=True)
        path = tree.token[tree.path(leaf)].tolist()
        chooser.path = [*path, 0]
        text = list(PROMPT)
        for i, (token, _) in enumerate(walk(tree, nodes, logits, chooser, text)):
            plain_logits, expected = transformers_step(TARGET, text, SAMPLED)
            torch.testing.assert_close(chooser.scores[i], expected, rtol=1e-4, atol=1e-3)
            torch.testing.assert_close(processed(plain_logits, text, SAMPLED), expected)
            text.append(token)
        assert text == [*PROMPT, *path, 0]


@pytest.mark.parametrize("wrong", [0, 2])
def test_rejected_drafts_do_not_move_a_penalty(wrong: int) -> None:
    """Every step a draft is rejected, at once or after two right tokens: the scores are those of the text alone."""
    sampling = replace(SAMPLED, repetition_penalty=1.8)
    answer = plain(TARGET, PROMPT, 16, sampling, eos=False)
    decoder = Decoder(TARGET, [Knowing(answer, (wrong,))], never(), DEEP, ignore_eos=True)
    result = decoder.generate(PROMPT, 16, sampling, record=True)
    assert result.metrics.verified_nodes > sum(result.metrics.accepted_lengths)
    assert result.tokens == answer
    assert result.scores is not None
    for i, scores in enumerate(result.scores):
        expected = transformers_step(TARGET, PROMPT + answer[:i], sampling)[1]
        torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-3)


def test_greedy_text_under_a_penalty_is_transformers_own() -> None:
    ids = torch.tensor([PROMPT])
    config = GenerationConfig(max_new_tokens=24, do_sample=False, repetition_penalty=1.4, pad_token_id=0)
    config.update(eos_token_id=VOCAB, return_dict_in_generate=True, output_logits=True, output_scores=True)
    theirs: Any = TARGET.module.generate(  # type: ignore[operator]
        ids, attention_mask=torch.ones_like(ids), generation_config=config
    )
    for kinds in ("n", "na", "nt"):
        decoder = Decoder(TARGET, drafters(kinds), always(3, len(kinds) - 1), SETTINGS, ignore_eos=True)
        ours = decoder.generate(PROMPT, 24, SamplingSettings(repetition_penalty=1.4), record=True)
        assert ours.tokens == theirs.sequences[0, len(PROMPT) :].tolist()
        torch.testing.assert_close(ours.logits, torch.cat(theirs.logits), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ours.scores, torch.cat(theirs.scores), rtol=1e-4, atol=1e-4)


# 13: the seed ignored; log-probabilities that are not the target's


@pytest.mark.parametrize("kinds", ["", "n", "na", "nro"])
def test_the_seed_decides_the_text_whoever_drafts(kinds: str) -> None:
    decoder = Decoder(TARGET, drafters(kinds), RandomScheduler(3), SETTINGS, ignore_eos=True)
    texts = [
        tuple(decoder.generate(PROMPT, 16, replace(SAMPLED, temperature=1.5, seed=seed)).tokens)
        for seed in (0, 1, 2, 0, 1, 2)
    ]
    assert texts[:3] == texts[3:]
    assert len(set(texts)) == 3
    assert texts[0] == tuple(plain(TARGET, PROMPT, 16, replace(SAMPLED, temperature=1.5, seed=0), eos=False))


@pytest.mark.parametrize("sampling", [SamplingSettings(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kinds", ["", "n", "na", "nt", "nro"])
def test_recorded_logits_and_scores_are_those_of_plain_decoding(kinds: str, sampling: SamplingSettings) -> None:
    decoder = Decoder(TARGET, drafters(kinds), always(3, max(len(kinds) - 1, 0)), SETTINGS, ignore_eos=True)
    result = decoder.generate([3, 7, 3, 7, 5], 30, sampling, record=True)
    assert_equal_to_plain(result, decode_plainly(TARGET, [3, 7, 3, 7, 5], 30, sampling, ignore_eos=True))
    unrecorded = decoder.generate([3, 7, 3, 7, 5], 30, sampling)
    assert (unrecorded.tokens, unrecorded.logits, unrecorded.scores) == (result.tokens, None, None)


# 15: slower than plain decoding


def test_a_drafter_that_is_never_called_costs_nothing() -> None:
    """The scheduler's way back to plain decoding: no token through the drafter, no node of its in the tree."""
    decoder = Decoder(TARGET, drafters("na"), never(), SETTINGS, ignore_eos=True)
    metrics = decoder.generate(PROMPT, 20).metrics
    assert metrics.processed["near"] == 0
    assert metrics.calls[1] == 0


@pytest.mark.parametrize("pays", [0, 1, 2, 4, 8])
def test_no_node_is_verified_beyond_the_size_that_pays(pays: int) -> None:
    """Verification is free up to a size and dearer than any gain behind it; 0 is plain decoding, step for step."""
    rows = [1, 1 + pays, 2 + pays, 64] if pays else [1, 2, 64]
    ms = [[1.0]] * (len(rows) - 2) + [[1e6], [2e6]]
    costs = cost_model(LatencyCurve(rows, [1], ms), (None, CHEAP))
    decoder = Decoder(TARGET, drafters("na"), always(3), SETTINGS, costs, 1.0, ignore_eos=True)
    metrics = decoder.generate(PROMPT, 20).metrics
    assert metrics.verified_nodes <= pays * metrics.steps
    assert (metrics.verified_nodes > 0) == (pays > 0)
    if pays == 0:
        assert metrics.steps == 20
        assert metrics.processed["target"] == len(PROMPT) + 20 - 1


# 17: baseline and method count tokens differently


def test_all_methods_count_tokens_alike(tmp_path: Path) -> None:
    """Emitted tokens, EOS included, prompt left out: the same for our engine, plain decoding and transformers' own."""
    target, near = (
        load_model(save_tiny(tmp_path / name, VOCAB, layers, seed=1), name, torch.device("cpu"), torch.float32)
        for name, layers in (("target", 2), ("near", 1))
    )
    config: Any = SimpleNamespace(evaluate=SimpleNamespace(max_new_tokens=12))
    prompt = np.array([3, 7, 3, 7, 5])
    full = plain(target, prompt.tolist(), 12, eos=False)
    finishes = set()
    for eos in (full[0], full[4], full[11], next(token for token in range(VOCAB) if token not in full)):
        target = replace(target, eos_token_ids=(eos,))
        members: list[Drafter] = [
            NgramDrafter(0, SETTINGS.ngram),
            LanguageModelDrafter(1, near, check_vocabularies(target, near)),
        ]
        models: Any = SimpleNamespace(target=target, drafters=[None, near])
        methods = hf_methods(models, 12) | {
            "plain": timed(config, Decoder(target, [], never(), SETTINGS)),
            "ngram": timed(config, Decoder(target, members[:1], never(), SETTINGS)),
            "strong": timed(config, Decoder(target, members, always(3), SETTINGS)),
        }
        expected = decode_plainly(target, prompt.tolist(), 12)
        finishes.add(expected.finish)
        for name, method in methods.items():
            row = method(prompt, SamplingSettings())
            assert row["token_ids"] == expected.tokens, name
            assert row["tokens"] == len(expected.tokens), name
            assert row["prompt_tokens"] == len(prompt), name
            assert (row["finish"], row["text"]) == (expected.finish, expected.text), name
            if row["steps"] is not None:
                by_depth = row["accepted_by_depth"]
                # A bonus token a step, but where the text ended on a drafted one.
                assert row["steps"] + sum(by_depth) - row["tokens"] in (0, 1), name
    assert finishes == {"eos", "length"}
