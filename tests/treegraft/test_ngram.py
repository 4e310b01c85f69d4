"""The n-gram index against a scan of the text."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from treegraft.drafters.ngram import SCANNED_OCCURRENCES, NgramDrafter, NgramIndex, prior_table
from treegraft.settings import DraftSettings, NgramSettings
from treegraft.tree import DraftTree

TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def scanned(text: list[int], suffix: list[int], max_match: int, limit: int) -> list[tuple[int, int]]:
    """All different continuations, longest match first, then newest."""
    found: dict[int, int] = {}
    for n in range(min(max_match, len(suffix)), 0, -1):
        for end in range(limit - 1, n - 1, -1):
            if text[end - n : end] == suffix[-n:]:
                found.setdefault(text[end], n)
    return list(found.items())


@given(TEXTS, st.lists(st.integers(0, 3), max_size=5), st.integers(1, 4), st.data())
def test_continuations_equal_a_scan(text: list[int], path: list[int], max_match: int, data: st.DataObject) -> None:
    assert len(text) <= SCANNED_OCCURRENCES + 8  # so that no occurrence is left out of the ranking
    limit = data.draw(st.integers(1, len(text)))
    index = NgramIndex(max_match)
    index.append(text)
    suffix = text[:limit] + path
    assert index.continuations(suffix, 99, limit) == scanned(text, suffix, max_match, limit)


def test_the_text_may_come_in_any_pieces() -> None:
    whole, pieces = NgramIndex(3), NgramIndex(3)
    whole.append([1, 2, 3, 1, 2, 4, 1, 2])
    for piece in ([1], [2, 3, 1], [], [2, 4, 1, 2]):
        pieces.append(piece)
    assert pieces.continuations([1, 2], 5, 8) == whole.continuations([1, 2], 5, 8) == [(4, 2), (3, 2), (1, 1)][:2]


def test_a_skip_adds_branches_and_a_continuation_path() -> None:
    settings = DraftSettings(depth=3, width=4, ngram=NgramSettings(max_match=2, branches=2, path=3))
    drafter = NgramDrafter(0, settings.ngram)
    drafter.begin(20)
    drafter.extend(np.array([7, 8, 9, 5, 7, 8, 6, 4, 7, 8]))
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
        drafter.begin(10)
        drafter.extend(np.array([1, 2, 3]))
        tree = DraftTree(3, 1)
        drafter.draft(tree, settings, 1, 10)
        assert len(tree) == 1
        drafter.extend(np.array([1, 2, 3]))
