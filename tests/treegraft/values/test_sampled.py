"""Expected accepted lengths under sampling, against enumeration, against drawing, and at the greedy end."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.treegraft.reference import plain
from tests.treegraft.test_decoder import NEAR, SETTINGS, TARGET, VOCAB
from tests.treegraft.values.test_lattice import COSTS, COUNT, PROMPT, alternatives, calibration, confidence
from treegraft.draft_vocabulary import DraftVocabulary
from treegraft.grafting import verification_order
from treegraft.sampling import SamplingSettings, TokenChooser
from treegraft.scheduling.features import RequestCosts
from treegraft.tree import DraftTree
from treegraft.values.lattice import Lattice, Outcomes, PathTrie
from treegraft.values.sampled import SampledTarget, expected_accepted, path_sums
from treegraft.values.states import code
from treegraft.vocabulary import check_vocabularies

WARM = SamplingSettings(temperature=0.9, top_k=20, top_p=0.95, min_p=0.01, repetition_penalty=1.1, seed=3)


def test_expectation_equals_enumeration_of_all_texts() -> None:
    """A Markov chain over three tokens as target: every text of three tokens, its probability and its walk."""
    random = np.random.default_rng(0)
    chain = random.dirichlet(np.ones(3), size=4)  # after token 0, 1, 2; row 3: at the root
    # root -> a0, a1; a0 -> b0, b2; b2 -> c1; a1 -> d0
    parent = np.array([0, 0, 0, 1, 1, 4, 2])
    token = np.array([3, 0, 1, 0, 2, 1, 0])
    edges = np.log(np.append(1.0, chain[token[parent[1:]], token[1:]]))
    order, sizes = np.array([1, 4, 2, 5, 3, 6]), (0, 1, 2, 4, 6, 9)
    found = expected_accepted(parent, edges, order, sizes)
    for size, value in zip(sizes, found, strict=True):
        kept = set(order[:size].tolist())
        total = 0.0
        for text in itertools.product(range(3), repeat=3):
            chance, before, at, accepted = 1.0, 3, 0, 0
            walking = True
            for drawn in text:
                chance *= chain[before, drawn]
                before = drawn
                child = [n for n in kept if parent[n] == at and token[n] == drawn]
                walking = walking and bool(child)
                if walking:
                    at, accepted = child[0], accepted + 1
            total += chance * accepted
        assert value == pytest.approx(total)


def test_path_sums_know_no_depth_and_no_order_of_certainty() -> None:
    parent = np.array([0, 0, 1, 2, 3, 4, 0, 6])
    edges = np.array([0, -1, 0, 0, -np.inf, 0, 0, 0.0])
    np.testing.assert_array_equal(path_sums(parent, edges), [0, -1, -1, -1, -np.inf, -np.inf, 0, 0])


class Kept(Lattice):
    """A lattice that keeps the finished trees."""

    def _block(self, first: int, count: int) -> Outcomes:
        self.first = first
        return super()._block(first, count)

    def _outcomes(self, leaves: Any, *more: Any) -> Outcomes:
        self.trees = getattr(self, "trees", {})
        self.trees |= {(self.first + leaf.at, leaf.prefix): leaf.tree for leaf in leaves}
        return super()._outcomes(leaves, *more)


def evaluated(text: np.ndarray, sampling: SamplingSettings, eos: tuple[int, ...] = (), chunk: int = 64) -> Any:
    target = replace(TARGET, eos_token_ids=eos)
    vocabulary = [DraftVocabulary(VOCAB), check_vocabularies(TARGET, NEAR)]
    lattice = Kept(
        SETTINGS,
        [None, NEAR],
        vocabulary,
        calibration(2),
        chunk,
        SampledTarget(target, sampling, chunk),
    )
    costs = RequestCosts(COSTS.prompt_tokens, COSTS.target_ms, COSTS.drafter_ms[:1])
    outcomes = lattice.evaluate(text, len(PROMPT), alternatives(text), confidence(text), COUNT, costs)
    return lattice, outcomes


def distribution(text: list[int], sampling: SamplingSettings) -> np.ndarray:
    """Of the next token, by one forward over the whole text and the decoder's own processors."""
    with torch.inference_mode():
        logits = TARGET.module(torch.tensor([text])).logits[0, -1:].float()
    scores = TokenChooser(sampling).processors(torch.tensor([text]), logits)  # type: ignore[arg-type]
    return np.asarray(scores[0].double().softmax(-1))


def walked(
    tree: DraftTree, kept: list[int], before: list[int], sampling: SamplingSettings, eos: tuple[int, ...]
) -> Any:
    """The expectation by a forward for every verified node, and the distribution at each place of the walk.

    A node whose token is in ``eos`` counts for nothing, and nothing below it does.
    """
    total, chance = 0.0, {0: 1.0}
    after: dict[int, np.ndarray] = {}
    texts = {0: before}
    for node in [0, *sorted(kept)]:
        if node:
            up = int(tree.parent[node])
            texts[node] = [*texts[up], int(tree.token[node])]
            ends = int(tree.token[node]) in eos
            chance[node] = 0.0 if ends else chance[up] * after[up][int(tree.token[node])]
            total += chance[node]
        after[node] = distribution(texts[node], sampling)
    return total, after


@pytest.mark.parametrize("eos", [(), (0, 4, 8, 12, 16, 20)])
@pytest.mark.parametrize(("sampling", "chunk"), [(WARM, 64), (SamplingSettings(temperature=1.0), 5)])
def test_the_lattice_expects_what_drawing_gives(sampling: SamplingSettings, chunk: int, eos: tuple[int, ...]) -> None:
    text = np.array(PROMPT + plain(TARGET, PROMPT, COUNT, sampling, eos=False))
    lattice, outcomes = evaluated(text, sampling, eos, chunk)
    random = np.random.default_rng(1)
    for position, prefix, g in ((0, (1, 1, 1), -1), (3, (0, 1, 0), -1), (6, (1, 0, 1), 2)):
        tree = lattice.trees[position, prefix]
        size = SETTINGS.verified_sizes[g]
        kept = verification_order(tree, size)[0].tolist()
        before = text[: len(PROMPT) + position].tolist()
        exact, after = walked(tree, kept, before, sampling, eos)
        found = float(outcomes.mean_accepted[position, code(prefix, 2), g])
        assert found == pytest.approx(exact, rel=1e-4, abs=1e-6)
        children = {(int(tree.parent[node]), int(tree.token[node])): node for node in kept}
        lengths = []
        for _ in range(3000):
            at, length = 0, 0
            while True:
                token = int(np.searchsorted(np.cumsum(after[at]), random.random(), side="right"))
                if (at, token) not in children or token in eos:
                    break
                at, length = children[at, token], length + 1
            lengths.append(length)
        error = max(np.std(lengths) / np.sqrt(len(lengths)), 1e-3)
        assert abs(np.mean(lengths) - found) < 4 * error


def test_nothing_is_drawn_below_the_end_of_the_text() -> None:
    sampling = SamplingSettings(temperature=1.0)
    text = np.array(PROMPT + plain(TARGET, PROMPT, COUNT, sampling, eos=False))
    prefix, position = (1, 1, 1), 2
    tree = evaluated(text, sampling)[0].trees[position, prefix]
    inner = int(tree.token[int(tree.parent[tree.size - 1])])  # some token that has a child in this tree
    _, outcomes = evaluated(text, sampling, eos=(inner,))
    kept = verification_order(tree, SETTINGS.verified_sizes[-1])[0].tolist()
    exact, _ = walked(tree, kept, text[: len(PROMPT) + position].tolist(), sampling, (inner,))
    assert float(outcomes.mean_accepted[position, code(prefix, 2), -1]) == pytest.approx(exact, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(("temperature", "tolerance"), [(0.0, 0.0), (1e-4, 1e-3)])
def test_the_greedy_end_is_the_accepted_length(temperature: float, tolerance: float) -> None:
    text = np.array(PROMPT + plain(TARGET, PROMPT, COUNT, eos=False))
    _, outcomes = evaluated(text, SamplingSettings(temperature=temperature))
    np.testing.assert_allclose(outcomes.mean_accepted, outcomes.accepted, atol=tolerance)
    assert outcomes.accepted.max() > 1


def test_one_more_than_expected_is_what_a_step_emits_also_where_the_text_ends() -> None:
    """Greedy text cut at a token that ends it: the step that comes to it emits no bonus token."""
    answer = plain(TARGET, PROMPT, COUNT, eos=False)
    end = next(token for i, token in enumerate(answer) if i >= 6 and token not in answer[:i])
    text = np.array(PROMPT + answer[: answer.index(end) + 1])
    _, outcomes = evaluated(text, SamplingSettings(), eos=(end,))
    left = len(text) - len(PROMPT) - np.arange(len(text) - len(PROMPT))
    emitted = np.minimum(outcomes.accepted + 1, left[:, None, None])
    np.testing.assert_array_equal(1 + outcomes.mean_accepted, emitted)
    assert (outcomes.accepted == left[:, None, None]).any(), "some tree holds the end of the text"


def test_columns_of_logits_without_a_token_have_no_chance() -> None:
    """As in the decoder, which cuts them off before it draws."""
    sampling, tokens = SamplingSettings(temperature=1.0), VOCAB - 6
    target = SampledTarget(replace(TARGET, vocab_size=tokens, eos_token_ids=()), sampling, 8)
    target.begin(np.array(PROMPT), len(PROMPT))
    trie = PathTrie(1)
    for token in range(tokens):
        trie.child(0, token)
    chances = distribution(PROMPT, sampling)[:tokens]
    np.testing.assert_allclose(
        target.reach(trie, 0, np.array([len(PROMPT) - 1]))[1:], chances / chances.sum(), rtol=1e-4
    )
