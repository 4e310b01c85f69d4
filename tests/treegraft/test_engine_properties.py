"""The decoder under random models, drafters, schedules, limits and stops: always plain decoding's output and caches."""

import functools
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.treegraft.reference import assert_caches_hold, assert_equal_to_plain, decode_plainly
from tests.treegraft.test_decoder import CHEAP, RandomScheduler
from tests.treegraft.tiny import cost_model, tiny_language_model
from treegraft.costs import CostModel, LatencyCurve
from treegraft.cpu_kernels import speed_up
from treegraft.decoder import Decoder
from treegraft.drafters import Drafter, LanguageModelDrafter, NgramDrafter
from treegraft.lean import lean_forward
from treegraft.models import LanguageModel
from treegraft.sampling import SamplingSettings
from treegraft.scheduling.policy import FixedSchedule, Scheduler
from treegraft.settings import DraftSettings, NgramSettings
from treegraft.vocabulary import check_vocabularies

EXAMPLES = 150
SIZES = (0, 1, 2, 3, 5, 8, 13, 21)


@functools.cache
def model(vocab: int, layers: int, seed: int, half: bool = False, lean: bool = False) -> LanguageModel:
    draft_tokens = np.arange(1, vocab, 2) if half else None
    made = tiny_language_model(vocab, layers, 16, 2, seed, name=f"{layers}-{seed}", draft_tokens=draft_tokens)
    if not lean:
        return made
    speed_up(made.module)
    forward = lean_forward(made.module)
    assert forward is not None
    return replace(made, lean=forward)


@st.composite
def draft_settings(draw: st.DrawFn) -> DraftSettings:
    few = st.integers(1, 4)
    sizes = draw(st.sets(st.sampled_from(SIZES), min_size=1))
    ngram = NgramSettings(draw(few), draw(st.integers(1, 3)), draw(st.integers(0, 3)), draw(few))
    return DraftSettings(draw(few), draw(few), draw(few), tuple(sorted(sizes)), ngram)


@st.composite
def sampling_settings(draw: st.DrawFn) -> SamplingSettings:
    return SamplingSettings(
        temperature=draw(st.sampled_from([0.0, 0.4, 0.8, 1.0, 1.5])),
        top_k=draw(st.sampled_from([0, 0, 1, 3, 30])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.5, 0.9])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.02, 0.2])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 0.8, 1.3])),
        seed=draw(st.integers(0, 99)),
    )


@st.composite
def decoders(draw: st.DrawFn) -> Decoder:
    vocab, layers, seed = draw(st.sampled_from([8, 13, 24])), draw(st.integers(1, 2)), draw(st.integers(0, 2))
    limits, lean = draw(draft_settings()), draw(st.booleans())
    target = replace(
        model(vocab, layers, seed, lean=lean),
        context_limit=draw(st.sampled_from([20, 30, 512])),
        eos_token_ids=tuple(sorted(draw(st.sets(st.integers(0, vocab - 1), max_size=2)))),
    )
    members: list[Drafter] = []
    for index in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(["n-gram", "near", "other", "half", "target"]))
        if kind == "n-gram":
            members.append(NgramDrafter(index, limits.ngram))
            continue
        drafter = {
            "near": model(vocab, 1, seed, lean=lean),
            "other": model(vocab, 1, seed + 1, lean=lean),
            "half": model(vocab, 1, seed, half=True, lean=lean),
            "target": target,
        }[kind]
        drafter = replace(drafter, context_limit=draw(st.sampled_from([9, 20, 512])))
        temperature = draw(st.sampled_from([0.5, 1.0, 2.0]))
        members.append(LanguageModelDrafter(index, drafter, check_vocabularies(target, drafter), temperature))
    actions = draw(st.none() | st.lists(st.integers(0, len(members) - 1), max_size=4))
    scheduler: Scheduler = RandomScheduler(seed) if actions is None else FixedSchedule(tuple(actions))
    costs: CostModel | None = None
    if draw(st.booleans()):
        target_ms = LatencyCurve([1, 4, 12], [1], [[1.0], [draw(st.sampled_from([1.1, 2.0]))], [3.0]])
        costs = cost_model(target_ms, (None, *(CHEAP for _ in members[1:])))
    return Decoder(
        target, members, scheduler, limits, costs, draw(st.sampled_from([0.0, 0.3, 1.0])), draw(st.booleans())
    )


@st.composite
def stop_strings(draw: st.DrawFn, vocab: int) -> tuple[str, ...]:
    """Whole words, beginnings of words, and strings that span two or three tokens."""
    word = st.integers(2, vocab - 1)
    kinds = st.one_of(
        word.map(lambda i: f"w{i}"),
        word.map(lambda i: f"{i % 10} w"),
        st.tuples(word, word).map(lambda pair: f" w{pair[0]} w{pair[1]}"),
        st.tuples(word, word).map(lambda pair: f"{pair[0]} w{pair[1]} w"),
    )
    return tuple(draw(st.lists(kinds, max_size=2)))


@settings(max_examples=EXAMPLES, derandomize=True, deadline=None, database=None)
@given(st.data())
def test_every_request_is_plain_decoding_and_leaves_its_text_in_the_caches(data: st.DataObject) -> None:
    decoder = data.draw(decoders())
    target = decoder.target
    for _ in range(2):  # the second request meets what the first one left
        prompt = data.draw(st.lists(st.integers(0, target.vocab_size - 1), min_size=1, max_size=12))
        count = data.draw(st.integers(1, 24))
        sampling = data.draw(sampling_settings())
        stop = data.draw(stop_strings(target.vocab_size))
        heard: list[int] = []
        result = decoder.generate(prompt, count, sampling, stop, heard.extend, record=True)
        assert_equal_to_plain(result, decode_plainly(target, prompt, count, sampling, stop, decoder.ignore_eos))
        assert heard == result.tokens
        assert result.metrics.tokens == len(result.tokens)
        assert_caches_hold(decoder, prompt + result.tokens, result)
