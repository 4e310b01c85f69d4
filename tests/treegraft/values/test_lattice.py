"""The shared-trie evaluation against naive enumeration and against the decoder itself."""

import numpy as np
import pytest
import torch

from tests.treegraft.reference import plain
from tests.treegraft.test_decoder import CHEAP, HALF, NEAR, OTHER, SETTINGS, TARGET, VOCAB, drafters
from tests.treegraft.tiny import cost_model
from treegraft.costs import LatencyCurve
from treegraft.decoder import Decoder
from treegraft.draft_vocabulary import DraftVocabulary
from treegraft.drafters import LanguageModelDrafter
from treegraft.drafters.ngram import NgramState, prior_table
from treegraft.grafting import accepted_mass, verification_order
from treegraft.models import LanguageModel
from treegraft.sampling import SamplingSettings
from treegraft.scheduling.features import RequestCosts, SchedulingState, feature_names, features
from treegraft.scheduling.outlook import Outlook
from treegraft.scheduling.policy import FixedSchedule
from treegraft.tree import NOT_PROCESSED, DraftTree
from treegraft.values.calibration import Calibration
from treegraft.values.lattice import Lattice, Outcomes
from treegraft.values.replay import replay_fixed
from treegraft.values.states import offset, prefixes, schedules, state_index
from treegraft.values.tables import build_tables
from treegraft.vocabulary import check_vocabularies

PROMPT = [3, 7, 3, 7, 5, 3, 7]
COUNT = 14
COSTS = RequestCosts(len(PROMPT), 1.0, (0.5, 0.7))
USUAL_HITS = (0.3, 0.8)
MODELS: dict[str, LanguageModel | None] = {"n": None, "a": NEAR, "r": HALF, "o": OTHER}


def lattice_outcomes(kinds: str, text: np.ndarray, chunk: int, dtype: torch.dtype = torch.float32) -> Outcomes:
    m = len(kinds)
    costs = RequestCosts(COSTS.prompt_tokens, COSTS.target_ms, COSTS.drafter_ms[: m - 1])
    models = [MODELS[kind] for kind in kinds]
    vocabulary = [DraftVocabulary(VOCAB) if model is None else check_vocabularies(TARGET, model) for model in models]
    lattice = Lattice(SETTINGS, models, vocabulary, calibration(m), chunk)
    return lattice.evaluate(text, len(PROMPT), alternatives(text), confidence(text), COUNT, costs)


def calibration(m: int) -> Calibration:
    return Calibration(prior_table(SETTINGS.ngram), (1.0,) * m, (0.5, *USUAL_HITS[: m - 1]))


def confidence(text: np.ndarray) -> np.ndarray:
    """The probability that the target gave to each answer token, from one forward over the whole text."""
    with torch.inference_mode():
        logits = TARGET.module(torch.from_numpy(text)[None]).logits[0, len(PROMPT) - 1 : -1]
    return logits.double().softmax(-1).numpy()[np.arange(len(logits)), text[len(PROMPT) :]]


def outlook(kinds: str, text: np.ndarray, position: int) -> Outlook:
    """What the text up to a position says, counted anew from its beginning."""
    hits = sure = 0.5
    state = NgramState(SETTINGS.ngram, prior_table(SETTINGS.ngram))
    state.read(PROMPT)
    likely, chances = alternatives(text), confidence(text)
    for i, token in enumerate(text[len(PROMPT) : len(PROMPT) + position].tolist()):
        read = state.index.tokens
        best = state.index.continuations(read, len(read), best_only=True)
        hits = 0.9 * hits + 0.1 * (bool(best) and best[0].token == token)
        sure = 0.9 * sure + 0.1 * chances[i]
        state.commit([token], likely[i : i + 1].tolist())
    found = list(USUAL_HITS[: len(kinds) - 1])
    for j, kind in enumerate(kinds[1:]):
        for hit in foreseen(kind, text)[:position]:
            found[j] = 0.9 * found[j] + 0.1 * hit
    if "n" not in kinds:
        return Outlook(position, 0.0, 0.0, 0.5, sure, tuple(found))
    best = state.index.continuations(state.index.tokens, len(state.index.tokens), best_only=True)
    row = best[0].row if best else -1
    return Outlook(
        position, (row + 1) / len(state.table), state.table[row, 0] if best else 0.0, hits, sure, tuple(found)
    )


def foreseen(kind: str, text: np.ndarray) -> list[bool]:
    """Whether each answer token is among those that a call of the drafter for its place proposes."""
    model = MODELS[kind]
    assert model is not None
    vocabulary = check_vocabularies(TARGET, model)
    with torch.inference_mode():
        logits = model.module(torch.from_numpy(text)[None]).logits[0, len(PROMPT) - 1 : -1, : vocabulary.size]
    proposed = vocabulary.of_columns(logits.topk(SETTINGS.width, dim=-1).indices.numpy())
    return [token in row for token, row in zip(text[len(PROMPT) :], proposed, strict=True)]


def alternatives(text: np.ndarray) -> np.ndarray:
    """The target's likeliest tokens in place of each answer token, from one forward over the whole text."""
    with torch.inference_mode():
        logits = TARGET.module(torch.from_numpy(text)[None]).logits[0, len(PROMPT) - 1 : -1]
    return np.asarray(logits.topk(SETTINGS.ngram.recycled).indices)


def naive(kinds: str, text: np.ndarray) -> Outcomes:
    """Every schedule at every position on its own, by the decoder's drafters with a cache of their own."""
    m, depth, sizes = len(kinds), SETTINGS.depth, SETTINGS.verified_sizes
    plans, positions = schedules(depth, m), len(text) - len(PROMPT)
    costs = RequestCosts(COSTS.prompt_tokens, COSTS.target_ms, COSTS.drafter_ms[: m - 1])
    shape = (positions, len(plans))
    out = Outcomes(
        np.zeros((positions, offset(depth, m), len(feature_names(depth, m))), np.float32),
        np.zeros((*shape, len(sizes)), np.int16),
        np.zeros((*shape, len(sizes)), np.float32),
        np.zeros(shape, np.int16),
        np.zeros((*shape, depth), np.int16),
        np.zeros((*shape, m), np.int16),
        np.zeros((*shape, 0), np.float32),  # greedy text
    )
    for position in range(positions):
        for u, plan in enumerate(plans.tolist()):
            root = len(PROMPT) - 1 + position
            members = drafters(kinds)
            for member in members:
                member.begin(text[: len(PROMPT)], 64)
                if position:
                    empty = np.zeros(0, np.int64)
                    answer = text[len(PROMPT) : root + 1]
                    member.commit(DraftTree(0, m), empty, answer, alternatives(text)[:position])
                if isinstance(member, LanguageModelDrafter):
                    member.runner.prefill(text[:root])
            tree = DraftTree(int(text[root]), m)
            max_depth = COUNT - position - 1
            seen = outlook(kinds, text, position)
            for layer, action in enumerate(plan, 1):
                prefix = tuple(plan[: layer - 1])
                state = SchedulingState(tree, layer, prefix, SETTINGS, max_depth, costs, seen)
                out.features[position, state_index(prefix, m)] = features(state)
                if max_depth < 1:
                    continue
                member = members[action]
                before = member.tokens_processed
                member.draft(tree, SETTINGS, layer, max_depth)
                out.layer_tokens[position, u, layer - 1] = member.tokens_processed - before
            truth = text[root + 1 : root + 1 + max(max_depth, 0)]
            order, probabilities = verification_order(tree, sizes[-1])
            for g, size in enumerate(sizes):
                at, accepted = 0, 0
                while accepted < len(truth):
                    below = [n for n in order[:size] if tree.parent[n] == at and tree.token[n] == truth[accepted]]
                    if not below:
                        break
                    at, accepted = int(below[0]), accepted + 1
                out.accepted[position, u, g] = accepted
            out.mass[position, u] = accepted_mass(probabilities, sizes)
            out.nodes[position, u] = len(tree) - 1
            for j in range(m):
                nodes = [0, *tree.walk(truth)]
                kept = [tree.row[j, node] != NOT_PROCESSED for node in nodes]
                out.path_processed[position, u, j] = kept.index(False) if False in kept else len(kept)
    return out


@pytest.mark.parametrize(
    ("kinds", "chunk"), [("na", 512), ("na", 5), ("no", 64), ("nao", 64), ("ao", 64), ("n", 64), ("nr", 64), ("ra", 64)]
)
def test_trie_evaluation_equals_naive_enumeration(kinds: str, chunk: int) -> None:
    text = np.array(PROMPT + plain(TARGET, PROMPT, COUNT, eos=False))
    trie, one_by_one = lattice_outcomes(kinds, text, chunk), naive(kinds, text)
    for name in ("accepted", "nodes", "layer_tokens", "path_processed", "mean_accepted"):
        np.testing.assert_array_equal(getattr(trie, name), getattr(one_by_one, name), err_msg=name)
    np.testing.assert_allclose(trie.mass, one_by_one.mass, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(trie.features, one_by_one.features, rtol=1e-3, atol=1e-4)
    assert trie.accepted[..., -1].max() > 0


def test_states_are_numbered_as_prefixes() -> None:
    for m in (1, 2, 3):
        assert [state_index(prefix, m) for prefix in prefixes(4, m)] == list(range(offset(4, m)))


@pytest.mark.parametrize("sampling", [SamplingSettings(), SamplingSettings(temperature=0.9, seed=4)])
@pytest.mark.parametrize("plan", [(0, 0, 0), (1, 0, 1), (1, 1, 1), (0, 1, 0)])
def test_replay_of_a_fixed_schedule_equals_the_decoder(plan: tuple[int, ...], sampling: SamplingSettings) -> None:
    """Steps, accepted tokens, verified nodes' count and drafter tokens: table and engine must tell the same story."""
    costs = cost_model(LatencyCurve([1, 64], [1], [[1.0], [4.0]]), (None, CHEAP), 0.01)
    text = np.array(PROMPT + plain(TARGET, PROMPT, COUNT, sampling, eos=False))
    outcomes = lattice_outcomes("na", text, 64)
    tables = build_tables(
        [("a/0", "a", len(PROMPT), outcomes)], feature_names(3, 2), 2, 3, SETTINGS.verified_sizes, costs
    )
    rate = 0.8
    replayed = replay_fixed(tables, plan, rate)
    members = drafters("na")
    decoder = Decoder(TARGET, members, FixedSchedule(plan), SETTINGS, costs, rate, ignore_eos=True)
    generated = decoder.generate(PROMPT, COUNT, sampling)
    metrics = generated.metrics
    assert PROMPT + generated.tokens == text.tolist()
    assert replayed.tokens.tolist() == [metrics.tokens]
    assert replayed.steps.tolist() == [metrics.steps]
    starts = np.cumsum([0, *(length + 1 for length in metrics.accepted_lengths)])[:-1]
    assert np.flatnonzero(replayed.visited).tolist() == starts.tolist()
    assert int(replayed.calls[0]) == metrics.calls[1]
