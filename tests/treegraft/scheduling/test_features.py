"""Features equal their definitions, computed node by node, at every state that real decoding passes through."""

import math
from dataclasses import replace

import numpy as np
import pytest

from tests.treegraft.test_decoder import FREE, SETTINGS, TARGET, RandomScheduler, drafters
from treegraft.decoder import Decoder
from treegraft.scheduling.features import SchedulingState, feature_names, features


def by_definition(state: SchedulingState) -> dict[str, float]:
    """The features of the tree, one by one."""
    tree, width, strong = state.tree, state.settings.width, state.tree.drafters - 1
    nodes = range(tree.size)
    chance = [math.exp(tree.score[node]) for node in nodes]
    front = tree.frontier.tolist()
    waiting = [
        node
        for node in nodes
        if not tree.expanded[strong, node]
        and tree.depth[node] < state.max_depth
        and tree.layer[node] >= state.layer - state.settings.look_back
    ]
    again = sorted(waiting, key=lambda node: (-tree.score[node], node))[:width] if strong else front

    def mean(values: list[float]) -> float:
        return sum(values) / len(values) if values else 0.0

    depth = mean([float(tree.depth[node]) for node in front])
    parents = [int(tree.parent[node]) for node in nodes[1:]]
    return {
        "frontier_depth": depth,
        "frontier_leaf_share": mean([float(node not in parents) for node in front]),
        "collapse_debt": depth - mean([float(tree.depth[node]) for node in again]) if again else 0.0,
        "lookback_share": mean([float(tree.layer[node] < state.layer - 1) for node in again]),
        "frontier_overlap": len(set(again) & set(front)) / width,
        "reselected_score": mean([float(tree.score[node]) for node in again]),
        "root_chance": max([chance[node] for node in nodes[1:] if tree.parent[node] == 0], default=0.0),
        "tree_mass": sum(chance[1:]),
        "frontier_mass": sum(chance[node] for node in front),
        "reselected_mass": sum(chance[node] for node in again),
    }


class Comparing(RandomScheduler):
    """Compares at every decision, then takes a random one."""

    sizes: set[int]

    def choose(self, state: SchedulingState) -> int:
        names = feature_names(state.settings.depth, state.tree.drafters)
        found = dict(zip(names, features(state), strict=True))
        expected = by_definition(state)
        np.testing.assert_allclose([found[name] for name in expected], list(expected.values()), rtol=1e-5, atol=1e-6)
        assert not state.tree.has_children()[state.tree.frontier].any()  # a skip that found nothing relies on it
        self.sizes.add(state.tree.size)
        return super().choose(state)


@pytest.mark.parametrize(("kinds", "look_back"), [("n", 3), ("na", 3), ("na", 1), ("nao", 2), ("a", 3)])
def test_features_are_what_they_are_called(kinds: str, look_back: int) -> None:
    scheduler = Comparing(3)
    scheduler.sizes = set()
    settings = replace(SETTINGS, look_back=look_back)
    decoder = Decoder(TARGET, drafters(kinds), scheduler, settings, None if len(kinds) != 2 else FREE, 1.0)
    decoder.generate([2, 3, 4, 2, 3], 24)  # up to the limit, where drafts must stay short
    assert 1 in scheduler.sizes
    assert max(scheduler.sizes) > 3
