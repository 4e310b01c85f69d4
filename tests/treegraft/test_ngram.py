"""The n-gram index against a scan of the text."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from treegraft.drafters.ngram import (
    RUNS,
    SCANNED_OCCURRENCES,
    TABLE_WEIGHT,
    NgramDrafter,
    NgramIndex,
    NgramState,
    prior_table,
)
from treegraft.settings import DraftSettings, NgramSettings
from treegraft.tree import DraftTree

TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def scanned(text: list[int], suffix: list[int], max_match: int, limit: int) -> list[tuple[int, int]]:
    """All different continuations with their rows, longest match first, then newest."""
    found: dict[int, int] = {}
    for n in range(min(max_match + 16, len(suffix)), 0, -1):
        for end in range(limit - 1, n - 1, -1):
            if text[end - n : end] == suffix[-n:]:
                more = n - max_match
                found.setdefault(text[end], n - 1 if more < 0 else max_match - 1 + sum(more >= r for r in RUNS[1:]))
    return list(found.items())


@given(TEXTS, st.lists(st.integers(0, 3), max_size=5), st.integers(1, 4), st.data())
def test_continuations_equal_a_scan(text: list[int], path: list[int], max_match: int, data: st.DataObject) -> None:
    assert len(text) <= SCANNED_OCCURRENCES + 8  # so that no occurrence is left out of the ranking
    limit = data.draw(st.integers(1, len(text)))
    index = NgramIndex(NgramSettings(max_match, branches=99, recycled=0))
    index.append(text)
    suffix = text[:limit] + path
    found = index.continuations(suffix, limit)
    assert [(token, row) for token, row, _ in found] == scanned(text, suffix, max_match, limit)
    assert [rank for _, _, rank in found] == list(range(len(found)))
    assert index.continuations(suffix, limit, best_only=True) == found[:1]


def test_the_text_may_come_in_any_pieces() -> None:
    whole, pieces = NgramIndex(NgramSettings(3)), NgramIndex(NgramSettings(3))
    whole.append([1, 2, 3, 1, 2, 4, 1, 2])
    for piece in ([1], [2, 3, 1], [], [2, 4, 1, 2]):
        pieces.append(piece)
    assert pieces.continuations([1, 2], 8) == whole.continuations([1, 2], 8) == [(4, 1, 0), (3, 1, 1)]


def test_a_skip_adds_branches_and_a_continuation_path() -> None:
    settings = DraftSettings(depth=3, width=4, ngram=NgramSettings(max_match=2, branches=2, path=3))
    drafter = NgramDrafter(0, settings.ngram)
    drafter.begin(np.array([7, 8, 9, 5, 7, 8, 6, 4, 7, 8]), 20)
    tree = DraftTree(8, 1)
    drafter.draft(tree, settings, 1, 10)
    texts = {tuple(tree.token[tree.path(node)].tolist()) for node in range(1, len(tree))}
    assert texts == {(6,), (9,), (6, 4), (6, 4, 7)}
    table = prior_table(settings.ngram)
    np.testing.assert_allclose(np.exp(tree.score[tree.walk(np.array([6]))]), table[1, 0])
    np.testing.assert_allclose(np.exp(tree.score[tree.walk(np.array([9]))]), table[1, 1])


def test_state_does_not_leak_between_requests() -> None:
    settings = DraftSettings()
    drafter = NgramDrafter(0, settings.ngram)
    for _ in range(2):
        drafter.begin(np.array([1, 2, 3]), 10)
        tree = DraftTree(3, 1)
        drafter.draft(tree, settings, 1, 10)
        assert len(tree) == 1
        drafter.commit(tree, np.zeros(0, np.int64), np.array([1, 2, 3]), np.array([[1, 8], [2, 9], [3, 7]]))


def test_recycled_tokens_follow_the_literal_ones() -> None:
    """Behind the newest longest match come the target's other choices there, best first, none twice."""
    index = NgramIndex(NgramSettings(max_match=2, branches=2, recycled=3))
    index.append([5, 6])
    index.append([7, 5, 6, 8, 5, 6], [[7, 1], [5], [6, 2], [8, 7, 3, 4], [5], [6]])
    found = index.continuations([5, 6], 8)
    assert found == [(8, 1, 0), (7, 1, 1), (3, 1, 2), (4, 1, 3), (1, 1, 4)]
    assert index.continuations([5, 6], 5) == [(7, 1, 0), (1, 1, 2)]  # as it was before the second occurrence


def test_chances_follow_what_the_answer_does() -> None:
    settings = NgramSettings(max_match=1, branches=1, recycled=0)
    table = prior_table(settings)
    state = NgramState(settings, table)
    state.read([1, 1, 1, 1])
    np.testing.assert_array_equal(state.table, table)  # the prompt's own repetitions are not counted
    state.commit([1] * 10, None)
    # Every token was foreseen, by matches of 3 tokens, then 4, and so on up to 12.
    rows = np.searchsorted(RUNS, np.arange(3, 13) - 1, side="right") - 1
    seen = np.bincount(rows, minlength=len(RUNS))[:, None]
    np.testing.assert_allclose(state.table, (seen + TABLE_WEIGHT * table) / (seen + TABLE_WEIGHT))


def test_the_match_that_goes_on_furthest_is_preferred() -> None:
    index = NgramIndex(NgramSettings(max_match=2, branches=2, recycled=0))
    index.append([1, 2, 3, 4, 10, 9, 3, 4, 11, 1, 2, 3, 4])
    assert index.continuations([1, 2, 3, 4], 13) == [(10, 2, 0), (11, 1, 1)]  # two tokens more; a full match
