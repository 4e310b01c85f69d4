"""The tree and the graft: one node per path, no node lost, every pruned set closed under parents."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from treegraft.grafting import accepted_mass, choose_size, graft, plan_call, verification_order
from treegraft.settings import DraftSettings
from treegraft.tree import DraftTree, FloatArray, IntArray


class TableScores:
    """NodeScores with a fixed table of log-probabilities: row r's are ``table[r]``."""

    def __init__(self, table: NDArray[np.float64]) -> None:
        self.table = table

    def edges(self, rows: IntArray, tokens: IntArray) -> FloatArray:
        return self.table[rows, tokens]

    def top(self, rows: IntArray, count: int) -> tuple[IntArray, FloatArray]:
        order = np.argsort(-self.table[rows], axis=1, kind="stable")[:, :count]
        return order, np.take_along_axis(self.table[rows], order, axis=1)


def paths(tree: DraftTree) -> list[tuple[int, ...]]:
    return [tuple(tree.token[tree.path(node)].tolist()) for node in range(len(tree))]


@st.composite
def grown(draw: st.DrawFn) -> tuple[DraftTree, list[list[tuple[int, ...]]]]:
    """A tree grown by random light expansions and random grafts of two drafters, and its paths after each layer."""
    vocabulary, drafters = 6, 3
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    limits = DraftSettings(depth=5, width=draw(st.integers(1, 4)), look_back=draw(st.integers(1, 5)))
    tree = DraftTree(0, drafters, capacity=draw(st.integers(2, 8)))
    history = [paths(tree)]
    logits = random.normal(0, 2, (3, 400, vocabulary))
    table = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    for layer in range(1, 6):
        action = draw(st.integers(0, 2))
        if action == 0:
            parents = random.permutation(len(tree))[:3]
            edges = np.log(random.uniform(0.05, 0.9, len(parents)))
            tree.add(parents, random.integers(0, vocabulary, len(parents)), edges, 0, layer)
        else:
            nodes = plan_call(tree, action, limits, layer, 6)
            tree.row[action, nodes] = tree.row[action].max() + 1 + np.arange(len(nodes))
            graft(tree, action, TableScores(table[action]), limits, layer, 6)
        history.append(paths(tree))
    return tree, history


@settings(max_examples=150, deadline=None)
@given(grown())
def test_a_tree_only_grows_and_has_one_node_a_path(case: tuple[DraftTree, list[list[tuple[int, ...]]]]) -> None:
    tree, history = case
    for before, after in itertools.pairwise(history):
        assert after[: len(before)] == before
    assert len(set(history[-1])) == len(tree)
    n = len(tree)
    assert (tree.parent[1:n] < np.arange(1, n)).all()
    assert (tree.depth[1:n] == tree.depth[tree.parent[1:n]] + 1).all()
    for node in range(1, n):
        above = [int(tree.parent[node])]
        while above[-1]:
            above.append(int(tree.parent[above[-1]]))
        assert set(np.flatnonzero(tree.ancestors[node, :n])) == {node, 0, *above}
        np.testing.assert_allclose(tree.score[node], tree.edge[[node, *above]].sum(), atol=1e-9)
        assert tree.walk(tree.token[tree.path(node)])[-1] == node


@settings(max_examples=150, deadline=None)
@given(grown())
def test_every_verified_set_is_closed_under_parents(case: tuple[DraftTree, list[list[tuple[int, ...]]]]) -> None:
    tree, _ = case
    order, probabilities = verification_order(tree, 400)
    assert len(order) == len(tree) - 1
    assert (np.diff(probabilities) <= 1e-12).all()
    seen = {0}
    for node in order.tolist():
        assert int(tree.parent[node]) in seen
        seen.add(node)


def test_a_graft_rescores_what_the_light_drafter_added_and_a_weaker_one_does_not_undo_it() -> None:
    limits = DraftSettings(depth=3, width=2, look_back=3)
    tree = DraftTree(0, 3)
    child = tree.add(np.array([0]), np.array([1]), np.array([-0.1]), 0, 1)
    tree.add(child, np.array([2]), np.array([-0.1]), 0, 1)
    weak, strong = np.log(np.array([[0.5, 0.3, 0.2]] * 4)), np.log(np.array([[0.1, 0.2, 0.7]] * 4))
    for action, table in ((2, strong), (1, weak)):
        nodes = plan_call(tree, action, limits, 2, 3)
        tree.row[action, nodes] = np.arange(len(nodes))
        graft(tree, action, TableScores(table), limits, 2, 3)
    np.testing.assert_allclose(np.exp(tree.score[[1, 2]]), [0.2, 0.2 * 0.7])
    assert tree.scorer[[1, 2]].tolist() == [2, 2]


@given(st.data())
def test_nodes_added_at_once_are_nodes_added_one_by_one(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 12))
    parents = [data.draw(st.integers(0, 2 + i)) for i in range(count)]  # old nodes, or some of these
    tokens, edges = list(range(10, 10 + count)), np.log(np.linspace(0.1, 0.9, count)).tolist()
    trees = [DraftTree(0, 2, capacity=4) for _ in range(2)]
    for tree in trees:
        tree.append([0, 0], [1, 2], [-0.5, -1.5], 0, 1)
    trees[0].append(parents, tokens, edges, 1, 2)
    for parent, token, edge in zip(parents, tokens, edges, strict=True):
        trees[1].append([parent], [token], [edge], 1, 2)
    for name in ("token", "parent", "depth", "layer", "source", "scorer", "edge", "score"):
        together, apart = (getattr(tree, name)[: len(tree)] for tree in trees)
        np.testing.assert_array_equal(together, apart)
    together, apart = (tree.ancestors[: len(tree), : len(tree)] for tree in trees)
    np.testing.assert_array_equal(together, apart)
    np.testing.assert_allclose(trees[0].score[: len(trees[0])], (trees[0].ancestors @ trees[0].edge)[: len(trees[0])])


def test_no_edge_is_asked_for_that_the_drafter_has_scored_already() -> None:
    asked: list[tuple[int, int]] = []

    class Noting(TableScores):
        def edges(self, rows: IntArray, tokens: IntArray) -> FloatArray:
            asked.extend(zip(rows.tolist(), tokens.tolist(), strict=True))
            return super().edges(rows, tokens)

    limits = DraftSettings(depth=4, width=2, look_back=4)
    tree = DraftTree(0, 2)
    tree.add(np.array([0]), np.array([1]), np.array([-0.1]), 0, 1)
    table = np.log(np.random.default_rng(0).dirichlet(np.ones(5), 40))
    for layer in (2, 3, 4):
        planned = plan_call(tree, 1, limits, layer, 9)
        tree.row[1, planned] = np.arange(len(planned)) + tree.row[1].max() + 1
        graft(tree, 1, Noting(table), limits, layer, 9)
    assert asked == [(0, 1)]  # what the light drafter had found, once
    np.testing.assert_allclose(tree.score, tree.ancestors @ tree.edge)
    below = np.flatnonzero(tree.scorer[: len(tree)] == 1)
    np.testing.assert_array_equal(tree.edge[below], table[tree.row[1, tree.parent[below]], tree.token[below]])


def test_look_back_recovers_a_branch_the_light_drafter_left_behind() -> None:
    limits = DraftSettings(depth=3, width=1, look_back=3)
    tree = DraftTree(0, 2)
    nodes = tree.add(np.array([0, 0]), np.array([1, 2]), np.log([0.6, 0.3]), 0, 1)
    deep = tree.add(nodes[:1], np.array([3]), np.log([0.9]), 0, 2)
    tree.frontier = deep
    table = np.log(np.array([[0.05, 0.05, 0.8, 0.1]] * 8))  # the strong drafter prefers token 2 everywhere
    for layer in (2, 3):
        planned = plan_call(tree, 1, limits, layer, 5)
        tree.row[1, planned] = np.arange(len(planned)) + tree.row[1].max() + 1
        graft(tree, 1, TableScores(table), limits, layer, 5)
    assert (2, 2) in paths(tree)


def test_sizes() -> None:
    sizes = (0, 1, 2, 4)
    np.testing.assert_allclose(accepted_mass(np.array([0.5, 0.25]), sizes), [0, 0.5, 0.75, 0.75])
    flat, steep = np.array([1.0, 1.0, 1.0, 1.0]), np.array([1.0, 2.0, 3.0, 5.0])
    mass = accepted_mass(np.array([0.5, 0.25, 0.2, 0.1]), sizes)
    assert sizes[choose_size(mass, flat, 0.3)] == 4
    # One more node costs a millisecond, worth 0.3 tokens: only the first node is likelier than that.
    assert sizes[choose_size(mass, steep, 0.3)] == 1
    assert sizes[choose_size(mass, steep, 0.6)] == 0


def test_no_graft_goes_deeper_than_allowed() -> None:
    """A drafter that is always called may fill the allowed depth and never passes it."""
    limits = DraftSettings(depth=4, width=2, look_back=4)
    tree = DraftTree(0, 2)
    for layer in range(1, 5):
        nodes = plan_call(tree, 1, limits, layer, 2)
        tree.row[1, nodes] = tree.row[1].max() + 1 + np.arange(len(nodes))
        graft(tree, 1, TableScores(np.log(np.full((20, 3), 1 / 3))), limits, layer, 2)
    assert tree.depth[: len(tree)].max() == 2
