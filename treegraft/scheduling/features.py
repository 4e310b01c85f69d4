"""What a scheduler sees of a scheduling state, each feature cheap and known online.

The published ones come first: with two drafters and depth 5 they are the paper's 17 inputs. Names are built here and
nowhere else.
"""

import math
from dataclasses import dataclass
from functools import cached_property

from treegraft.grafting import best_open
from treegraft.scheduling.outlook import Outlook
from treegraft.settings import DraftSettings
from treegraft.tree import DraftTree


@dataclass(frozen=True)
class RequestCosts:
    """What is constant in one request: its length, and what the models cost in it."""

    prompt_tokens: int
    target_ms: float
    """Of one token in the target."""
    drafter_ms: tuple[float, ...]
    """Of one token in each drafter but the light one, [m - 1]."""
    new_tokens: int = 0
    """Most tokens that it may emit."""
    prompt_ms: tuple[float, ...] = ()
    """What the first call of each drafter but the light one adds for the prompt, [m - 1]."""

    @cached_property
    def features(self) -> list[float]:
        """The leading features, which are constant in a request and alone depend on the machine."""
        ratios = [math.log(ms / self.target_ms) for ms in self.drafter_ms]
        return [math.log1p(self.prompt_tokens), self.target_ms, *self.drafter_ms, *ratios]


@dataclass(slots=True)
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
    """Names in order for D = depth and m = drafters: the 10 + (D + 2)(m - 1) published ones, then 8 + m of our own."""
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
        *(f"drafter{j}_hits" for j in strong),
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


def features(state: SchedulingState) -> list[float]:
    """The feature vector of a state, of len(feature_names).

    A decision may cost 50 microseconds in all, and a call of numpy takes one or two whatever it works on, several where
    a model's forward has just emptied the caches: over the few dozen nodes of a tree plain lists are cheaper.
    """
    tree, settings, outlook = state.tree, state.settings, state.outlook
    strong = tree.drafters - 1
    called = [0.0] * (settings.depth * strong)
    calls = 0
    for layer, action in enumerate(state.prefix):
        if action:
            called[layer * strong + action - 1] = 1.0
            calls += 1
    shape, mass = _bare_root(state) if tree.size == 1 else _grown(state)
    return [
        *state.costs.features,
        state.layer / settings.depth,
        calls / settings.depth,
        *called,
        *shape,
        math.log1p(outlook.answer_tokens),
        outlook.match,
        outlook.chance,
        outlook.hits,
        outlook.confidence,
        *outlook.drafter_hits,
        *mass,
    ]


def _bare_root(state: SchedulingState) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """What ``_grown`` says of a tree without nodes: the first layer's, and every later one's if nothing was found."""
    settings = state.settings
    again = float(state.tree.drafters == 1 or (state.max_depth > 0 and state.layer <= settings.look_back))
    return (0.0, 1.0, 0.0, again * (state.layer > 1), again / settings.width, 0.0), (0.0, 0.0, 1.0, again)


def _grown(state: SchedulingState) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The tree's shape (frontier_depth .. reselected_score) and its mass (root_chance .. reselected_mass)."""
    tree, settings = state.tree, state.settings
    strong, n = tree.drafters - 1, tree.size
    front = tree.frontier.tolist()
    parent, depth, layer = tree.parent[:n].tolist(), tree.depth[:n].tolist(), tree.layer[:n].tolist()
    score = tree.score[:n].tolist()
    chance = list(map(math.exp, score))
    again = front
    if strong:
        closed = tree.expanded[strong, :n].tolist()
        again = best_open(closed, depth, layer, score, settings, state.layer, state.max_depth)
    front_depth = leaves = 0
    front_mass = 0.0
    for node in front:
        front_depth += depth[node]
        front_mass += chance[node]
        leaves += node not in parent
    mean_depth = front_depth / len(front)
    again_depth = older = shared = 0
    again_mass = again_score = 0.0
    newest = state.layer - 1
    for node in again:
        again_depth += depth[node]
        again_mass += chance[node]
        again_score += score[node]
        older += layer[node] < newest
        shared += node in front
    count = len(again) or 1
    shape = (
        mean_depth,
        leaves / len(front),
        mean_depth - again_depth / count if again else 0.0,
        older / count,
        shared / settings.width,
        again_score / count,
    )
    below_root = max([chance[node] for node in range(1, n) if not parent[node]])
    return shape, (below_root, sum(chance) - 1.0, front_mass, again_mass)
