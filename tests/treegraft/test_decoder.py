"""The decoder against plain decoding: same text for every scheduler and number of drafters, no token twice."""

import numpy as np
import pytest
import torch

from tests.treegraft.reference import plain
from tests.treegraft.tiny import cost_model, tiny_language_model
from treegraft.costs import LatencyCurve
from treegraft.decoder import Decoder
from treegraft.drafters import Drafter, LanguageModelDrafter, NgramDrafter
from treegraft.errors import UserError
from treegraft.models import LanguageModel
from treegraft.sampling import SamplingSettings
from treegraft.scheduling.features import SchedulingState
from treegraft.scheduling.policy import FixedSchedule, Scheduler, always, never
from treegraft.settings import DraftSettings, NgramSettings
from treegraft.tree import DraftTree, IntArray
from treegraft.vocabulary import check_vocabularies

VOCAB = 24
SETTINGS = DraftSettings(
    depth=3, width=3, look_back=3, verified_sizes=(0, 1, 2, 4, 8, 16), ngram=NgramSettings(3, 2, 2, 3)
)
TARGET = tiny_language_model(vocab_size=VOCAB, seed=1, name="target")
NEAR = tiny_language_model(vocab_size=VOCAB, seed=1, layers=1, name="near")
HALF = tiny_language_model(vocab_size=VOCAB, seed=1, layers=1, name="half", draft_tokens=np.arange(0, VOCAB, 2))
OTHER = tiny_language_model(vocab_size=VOCAB, seed=2, name="other")
CHEAP = LatencyCurve([1, 64], [1], [[0.1], [0.1001]])
FREE = cost_model(LatencyCurve([1, 64], [1], [[1.0], [1.0001]]), (None, CHEAP))


class RandomScheduler:
    """Any drafter in any layer, by a seeded coin."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)

    def choose(self, state: SchedulingState) -> int:
        return int(self.random.integers(state.tree.drafters))


def drafters(kinds: str) -> list[Drafter]:
    """n: n-grams, a: a model like the target, r: that model with half a head, o: another, t: the target itself."""
    models = {"a": NEAR, "r": HALF, "o": OTHER, "t": TARGET}
    return [
        NgramDrafter(i, SETTINGS.ngram)
        if kind == "n"
        else LanguageModelDrafter(i, models[kind], check_vocabularies(TARGET, models[kind]))
        for i, kind in enumerate(kinds)
    ]


SCHEDULERS: dict[str, Scheduler] = {
    "never": never(),
    "last layer": FixedSchedule((0, 0, 1)),
    "first layer": FixedSchedule((1,)),
}


@pytest.mark.parametrize("sampling", [SamplingSettings(), SamplingSettings(temperature=0.8, top_p=0.95, seed=5)])
@pytest.mark.parametrize("kinds", ["n", "a", "no", "na", "nao", "aon", "nr", "nra"])
@pytest.mark.parametrize("name", ["never", "always", "first layer", "last layer", "random"])
def test_output_equals_plain_decoding(kinds: str, name: str, sampling: SamplingSettings) -> None:
    prompt = [3, 7, 3, 7, 5]
    m = len(kinds)
    if name == "random":
        scheduler: Scheduler = RandomScheduler(4)
    elif name == "always":
        scheduler = always(3, m - 1)
    else:
        scheduler = SCHEDULERS[name] if m > 1 else never()
    decoder = Decoder(TARGET, drafters(kinds), scheduler, SETTINGS, ignore_eos=True)
    for _ in range(2):  # the second request starts from used caches
        result = decoder.generate(prompt, 40, sampling)
        assert result.tokens == plain(TARGET, prompt, 40, sampling, eos=False)
        assert result.metrics.tokens == 40


@pytest.mark.parametrize("name", ["never", "random"])
def test_an_observer_sees_every_step_and_changes_none(name: str) -> None:
    prompt = [3, 7, 3, 7, 5]
    seen: list[int] = []

    def observe(tree: DraftTree, verified: IntArray, accepted: IntArray, emitted: IntArray) -> None:
        assert {*tree.parent[verified].tolist()} <= {0, *verified.tolist()}
        assert {*accepted.tolist()} <= {*verified.tolist()}
        assert tree.walk(emitted[: len(accepted)]).tolist() == accepted.tolist()
        assert len(emitted) - len(accepted) in (0, 1)
        assert tree.token[0] == (prompt + seen)[-1]
        seen.extend(emitted.tolist())

    results = []
    for observer in (None, observe):
        scheduler: Scheduler = RandomScheduler(4) if name == "random" else never()
        decoder = Decoder(TARGET, drafters("na"), scheduler, SETTINGS, ignore_eos=True)
        results.append(decoder.generate(prompt, 40, on_step=observer))
    assert seen == results[0].tokens == results[1].tokens
    assert results[0].metrics.steps == results[1].metrics.steps


def test_no_drafter_is_plain_decoding() -> None:
    result = Decoder(TARGET, [], never(), SETTINGS, ignore_eos=True).generate([2, 3], 20)
    assert result.tokens == plain(TARGET, [2, 3], 20, eos=False)
    assert result.metrics.steps == 20
    assert result.metrics.processed == {"target": 2 + 20 - 1}


def test_perfect_drafter_fills_every_step() -> None:
    """The target as its own drafter: each step emits depth + 1 tokens, the last one what is left."""
    decoder = Decoder(TARGET, drafters("nt"), always(3), SETTINGS, ignore_eos=True)
    metrics = decoder.generate([2, 9, 4], 4 * 5 + 2).metrics
    assert metrics.accepted_lengths == [3] * 5 + [1]
    assert metrics.steps == 6


def test_hopeless_drafter_costs_nothing_but_time() -> None:
    class Wrong:
        """Proposes only a token that the target never emits: one beyond those it has seen chosen."""

        name, index, tokens_processed, hits = "wrong", 0, 0, 0.5

        def begin(self, prompt: np.ndarray, capacity: int) -> None: ...
        def commit(self, tree: object, accepted: np.ndarray, tokens: np.ndarray, alternatives: np.ndarray) -> None:
            assert len(accepted) == 0

        def draft(self, tree, settings, layer, max_depth) -> None:  # type: ignore[no-untyped-def]
            tree.add(np.array([0]), np.array([VOCAB + layer]), np.array([-0.1]), 0, layer)

    wide = tiny_language_model(vocab_size=VOCAB + 8, seed=1, name="wide")
    with torch.no_grad():
        wide.module.lm_head.weight[VOCAB:] = 0
    result = Decoder(wide, [Wrong()], never(), SETTINGS, ignore_eos=True).generate([2, 9], 12)
    assert result.tokens == plain(wide, [2, 9], 12, eos=False)
    assert result.metrics.steps == 12
    assert result.metrics.accepted_by_depth == []


@pytest.mark.parametrize("kinds", ["na", "nao"])
def test_no_model_processes_a_token_twice(kinds: str) -> None:
    """KV lengths after every step, and the target's count: prompt and emitted tokens once, plus rejected nodes."""
    members = drafters(kinds)
    decoder = Decoder(TARGET, members, RandomScheduler(1), SETTINGS, ignore_eos=True)
    metrics = decoder.generate([3, 7, 3, 7, 5], 30).metrics
    committed = 5 + 30 - 1
    assert decoder.runner.committed == decoder.runner.cache.length == committed
    rejected = metrics.verified_nodes - sum(metrics.accepted_lengths)
    assert metrics.processed["target"] == committed + rejected
    for drafter in members[1:]:
        assert isinstance(drafter, LanguageModelDrafter)
        assert drafter.runner.cache.length == drafter.runner.committed <= committed
        # What it kept is the text: a fresh pass over it gives the same next logits.
        with torch.inference_mode():
            tokens = drafter.text[: drafter.runner.committed + 1]
            expected = drafter.model.module(torch.from_numpy(tokens)[None]).logits[0, -1]
            found = drafter.runner.prefill(tokens[-1:], 0)[0]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_drafter_skipped_for_steps_catches_up_on_exactly_the_missing_tokens() -> None:
    class EveryThirdStep:
        step = 0

        def choose(self, state: SchedulingState) -> int:
            self.step += state.layer == 1
            return int(self.step % 3 == 0 and state.layer == 1)

    members = drafters("na")
    decoder = Decoder(TARGET, members, EveryThirdStep(), SETTINGS, ignore_eos=True)
    metrics = decoder.generate([3, 7, 3, 7, 5], 30).metrics
    strong = members[1]
    assert isinstance(strong, LanguageModelDrafter)
    # One call a step processes the root alone, so every committed token went through the drafter once, none twice.
    assert metrics.calls[1] >= 2
    assert metrics.processed["near"] == strong.runner.committed


def test_eos_inside_an_accepted_span_ends_the_text_there() -> None:
    """Every token of the alphabet made EOS in turn: the text is the plain text up to its first occurrence."""
    full = plain(TARGET, [2, 9, 4], 24, eos=False)
    for eos in sorted(set(full)):
        target = LanguageModel(**{**TARGET.__dict__, "eos_token_ids": (eos,)})
        decoder = Decoder(target, drafters("nt"), always(3), SETTINGS)
        result = decoder.generate([2, 9, 4], 24)
        assert result.tokens == full[: full.index(eos) + 1]
        assert result.finish == "eos"
        # Every step emits its accepted nodes and a bonus token, but for a last one whose EOS was itself a node.
        ended_on_node = sum(result.metrics.accepted_lengths) + result.metrics.steps - result.metrics.tokens
        assert ended_on_node in (0, 1)
        assert result.metrics.tokens == len(result.tokens)
        assert decoder.runner.committed == decoder.runner.cache.length == 3 + len(result.tokens) - 1 + ended_on_node


def test_limits_and_stop_reasons_in_order() -> None:
    """One token allowed; EOS on the last allowed token is still EOS; a one-token prompt; the context's end."""
    full = plain(TARGET, [5], 12, eos=False)
    decoder = Decoder(TARGET, drafters("na"), always(3), SETTINGS, ignore_eos=True)
    one = decoder.generate([5], 1)
    assert (one.tokens, one.finish) == (full[:1], "length")
    first = full.index(full[-1]) + 1
    target = LanguageModel(**{**TARGET.__dict__, "eos_token_ids": (full[-1],)})
    ended = Decoder(target, drafters("na"), always(3), SETTINGS).generate([5], first)
    assert (len(ended.tokens), ended.finish) == (first, "eos")
    short = tiny_language_model(vocab_size=VOCAB, seed=1, max_position_embeddings=16, name="target")
    near = tiny_language_model(vocab_size=VOCAB, seed=1, layers=1, max_position_embeddings=10, name="near")
    members: list[Drafter] = [
        NgramDrafter(0, SETTINGS.ngram),
        LanguageModelDrafter(1, near, check_vocabularies(short, near)),
    ]
    end = Decoder(short, members, always(3), SETTINGS, ignore_eos=True).generate([5, 6], 100)
    assert (end.tokens, end.finish) == (plain(TARGET, [5, 6], 14, eos=False), "context")
    with pytest.raises(UserError, match="16 tokens, but target holds 16"):
        Decoder(short, [], never(), SETTINGS).generate([2] * 16, 4)
    with pytest.raises(UserError, match="empty"):
        decoder.generate([], 4)


def test_caches_grow_with_the_answer_and_not_with_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treegraft.decoder.ROOM", 8)
    decoder = Decoder(TARGET, drafters("na"), always(3), SETTINGS, ignore_eos=True)
    caches = [decoder.runner, decoder.drafters[1].runner]  # type: ignore[attr-defined]
    assert decoder.generate([5, 9], 20, eos=()).tokens == plain(TARGET, [5, 9], 20, eos=False)
    few = [runner.cache.capacity for runner in caches]
    assert decoder.generate([5, 9], 400).tokens == plain(TARGET, [5, 9], 400, eos=False)
    many = [runner.cache.capacity for runner in caches]
    assert few == [256, 256]
    assert all(400 <= capacity <= 768 for capacity in many)


def test_stop_string_inside_a_span_cuts_text_and_tokens() -> None:
    full = plain(TARGET, [2, 9, 4], 24, eos=False)
    text = TARGET.tokenizer.decode(full)
    for at in (3, 7, 11):
        word = f"w{full[at]}"
        result = Decoder(TARGET, drafters("nt"), always(3), SETTINGS, ignore_eos=True).generate(
            [2, 9, 4], 24, stop=(word,)
        )
        assert result.finish == "stop"
        assert result.tokens == full[: len(result.tokens)]
        assert result.text == text[: text.index(word)]
        assert word not in TARGET.tokenizer.decode(result.tokens[:-1])


def test_verified_size_follows_the_hardware() -> None:
    """Free verification takes the largest size; verification dearer than a token is worth falls back to plain steps."""
    dear = cost_model(LatencyCurve([1, 64], [1], [[1.0], [1000.0]]), (None, CHEAP))
    free = Decoder(TARGET, drafters("na"), always(3), SETTINGS, FREE, 1.0, ignore_eos=True).generate([2, 9], 20).metrics
    costly = (
        Decoder(TARGET, drafters("na"), always(3), SETTINGS, dear, 1.0, ignore_eos=True).generate([2, 9], 20).metrics
    )
    assert free.verified_nodes > 5 * free.steps
    assert costly.verified_nodes == 0
    assert costly.steps == 20
