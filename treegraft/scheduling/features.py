"""What a scheduler sees: the published features of a scheduling state, each cheap and known online.

With two drafters and depth 5 these are the paper's 17 inputs. Names are built here and nowhere else.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treegraft.grafting import reselect
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


def feature_names(depth: int, drafters: int) -> list[str]:
    """Names in order for D = depth and m = drafters: 10 + (D + 2)(m - 1) of them."""
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
    ]


def cost_features(costs: RequestCosts) -> list[float]:
    """The leading features, which are constant in a request and alone depend on the machine."""
    ratios = [float(np.log(ms / costs.target_ms)) for ms in costs.drafter_ms]
    return [float(np.log1p(costs.prompt_tokens)), costs.target_ms, *costs.drafter_ms, *ratios]


def features(state: SchedulingState) -> NDArray[np.float32]:
    """The feature vector of a state, float32 [len(feature_names)]."""
    tree, settings, costs = state.tree, state.settings, state.costs
    strong = tree.drafters - 1
    called = np.zeros((settings.depth, strong), np.float32)
    for layer, action in enumerate(state.prefix):
        if action:
            called[layer, action - 1] = 1
    frontier = tree.frontier
    again = reselect(tree, strong, settings, state.layer, state.max_depth) if strong else frontier
    shape = [float(tree.depth[frontier].mean()), float((~tree.has_children()[frontier]).mean()), 0.0, 0.0, 0.0, 0.0]
    if len(again):
        shape[2] = shape[0] - float(tree.depth[again].mean())
        shape[3] = float((tree.layer[again] < state.layer - 1).mean())
        shape[4] = len(np.intersect1d(again, frontier, assume_unique=True)) / settings.width
        shape[5] = float(tree.score[again].mean())
    return np.array(
        [
            *cost_features(costs),
            state.layer / settings.depth,
            sum(action > 0 for action in state.prefix) / settings.depth,
            *called.ravel().tolist(),
            *shape,
        ],
        np.float32,
    )
