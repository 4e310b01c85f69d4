"""What a scheduler sees of a scheduling state, each feature cheap and known online.

The published ones come first: with two drafters and depth 5 they are the paper's 17 inputs. Names are built here and
nowhere else.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treegraft.grafting import reselect
from treegraft.scheduling.outlook import Outlook
from treegraft.settings import DraftSettings
from treegraft.tree import DraftTree


@dataclass(frozen=True)
class RequestCosts:
    """What is constant in one request: its length and the modelled cost of one token in each model."""

    prompt_tokens: int
    target_ms: float
    drafter_ms: tuple[float, ...]
    """Of each drafter but the light one, [m - 1]."""


@dataclass
class SchedulingState:
    """The state before the decision of one layer."""

    tree: DraftTree
    layer: int
    """From 1."""
    prefix: tuple[int, ...]
    """The actions of the layers before, [layer - 1]."""
    settings: DraftSettings
    max_depth: int
    costs: RequestCosts
    outlook: Outlook


def feature_names(depth: int, drafters: int) -> list[str]:
    """Names in order for D = depth and m = drafters: the 10 + (D + 2)(m - 1) published ones, then 9 of our own."""
    strong = range(1, drafters)
    return [
        "log_prompt_tokens",
        "target_ms",
        *(f"drafter{j}_ms" for j in strong),
        *(f"log_cost_ratio{j}" for j in strong),
        "layer_share",
        "call_share",
        *(f"called{j}_layer{layer}" for layer in range(1, depth + 1) for j in strong),
        "frontier_depth",
        "frontier_leaf_share",
        "collapse_debt",
        "lookback_share",
        "frontier_overlap",
        "reselected_score",
        "log_answer_tokens",
        "light_match",
        "light_chance",
        "light_hits",
        "target_confidence",
        "root_chance",
        "tree_mass",
        "frontier_mass",
        "reselected_mass",
    ]


def feature_groups(depth: int, drafters: int) -> dict[str, list[str]]:
    """The names by group, in order: the published ones, then of our own those of the text and those of the tree."""
    names = feature_names(depth, drafters)
    text, tree = names.index("log_answer_tokens"), names.index("root_chance")
    return {"published": names[:text], "text": names[text:tree], "tree": names[tree:]}


def cost_features(costs: RequestCosts) -> list[float]:
    """The leading features, which are constant in a request and alone depend on the machine."""
    ratios = [math.log(ms / costs.target_ms) for ms in costs.drafter_ms]
    return [math.log1p(costs.prompt_tokens), costs.target_ms, *costs.drafter_ms, *ratios]


def features(state: SchedulingState) -> NDArray[np.float32]:
    """The feature vector of a state, float32 [len(feature_names)]."""
    tree, settings = state.tree, state.settings
    strong = tree.drafters - 1
    called = [0.0] * (settings.depth * strong)
    for layer, action in enumerate(state.prefix):
        if action:
            called[layer * strong + action - 1] = 1.0
    frontier = tree.frontier
    again = reselect(tree, strong, settings, state.layer, state.max_depth) if strong else frontier
    depth = _mean(tree.depth[frontier])
    leaf_share = 1.0 - _mean(tree.has_children()[frontier])
    chances = np.exp(tree.score[: tree.size])
    debt = lookback = overlap = score = again_mass = 0.0
    if len(again):
        debt = depth - _mean(tree.depth[again])
        lookback = _mean(tree.layer[again] < state.layer - 1)
        overlap = len(set(again.tolist()).intersection(frontier.tolist())) / settings.width
        score = _mean(tree.score[again])
        again_mass = float(chances[again].sum())
    calls = sum(action > 0 for action in state.prefix)
    position = [state.layer / settings.depth, calls / settings.depth]
    shape = [depth, leaf_share, debt, lookback, overlap, score]
    outlook = state.outlook
    text = [math.log1p(outlook.answer_tokens), outlook.match, outlook.chance, outlook.hits, outlook.confidence]
    below_root = chances[1:][tree.parent[1 : tree.size] == 0]
    mass = [
        float(below_root.max()) if len(below_root) else 0.0,
        float(chances[1:].sum()),
        float(chances[frontier].sum()),
        again_mass,
    ]
    return np.array([*cost_features(state.costs), *position, *called, *shape, *text, *mass], np.float32)


def _mean(values: NDArray[Any]) -> float:
    """numpy's own ``mean`` takes several times longer on a handful of numbers."""
    return float(values.sum()) / len(values)
