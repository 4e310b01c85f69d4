"""A learned scheduler that cannot tell: the best fixed schedule acts, and it is counted."""

import numpy as np
import pytest

from tests.treegraft.test_decoder import FREE, SETTINGS, TARGET, drafters
from treegraft.decoder import Decoder
from treegraft.scheduling.features import RequestCosts, SchedulingState, feature_names
from treegraft.scheduling.network import MarginNetwork
from treegraft.scheduling.outlook import OutlookTracker
from treegraft.scheduling.policy import FixedSchedule, LearnedScheduler
from treegraft.tree import DraftTree

NAMES = feature_names(SETTINGS.depth, 2)
PROMPT = [2, 3, 4, 2, 3]
BEST_FIXED = FixedSchedule((0, 1, 0))


def scheduler(bias: float, weight: float = 0.0) -> LearnedScheduler:
    """Predicts the margin ``bias`` + ``weight`` x log prompt length everywhere."""
    weights = np.zeros((len(NAMES), 1), np.float32)
    weights[0] = weight
    network = MarginNetwork([weights], [np.full(1, bias, np.float32)], np.zeros(len(NAMES)), np.ones(len(NAMES)))
    return LearnedScheduler(network, NAMES, NAMES)


@pytest.mark.parametrize(
    "learned", [scheduler(float("nan")), scheduler(float("inf")), scheduler(-1e9), scheduler(0, 1e6)]
)
def test_an_impossible_margin_leaves_the_layer_to_the_fallback(learned: LearnedScheduler) -> None:
    fixed = Decoder(TARGET, drafters("na"), BEST_FIXED, SETTINGS, FREE, 1.0).generate(PROMPT, 20)
    result = Decoder(TARGET, drafters("na"), learned, SETTINGS, FREE, 1.0, fallback=BEST_FIXED).generate(PROMPT, 20)
    assert result.tokens == fixed.tokens
    assert result.metrics.calls == fixed.metrics.calls
    assert result.metrics.fallbacks == sum(result.metrics.calls) > 0


@pytest.mark.parametrize(
    ("margins", "action"),
    [
        ([0.5, 0.25], 1),
        ([-2.0 * SETTINGS.verified_sizes[-1], -3.0], 0),  # dearer than all that is verified could bring
        ([-11.0 * SETTINGS.verified_sizes[-1], -3.0], None),
        ([0.5, float("nan")], None),
        ([float("-inf"), 0.5], None),
        ([0.5, SETTINGS.verified_sizes[-1] + 0.1], None),
    ],
)
def test_every_drafter_s_margin_must_be_possible(
    monkeypatch: pytest.MonkeyPatch, margins: list[float], action: int | None
) -> None:
    names = feature_names(SETTINGS.depth, 3)
    two = np.zeros((len(names), 2), np.float32)
    network = MarginNetwork([two], [np.zeros(2, np.float32)], np.zeros(len(names)), np.ones(len(names)))
    learned = LearnedScheduler(network, names, names)
    monkeypatch.setattr(learned, "margins", lambda state: margins)
    costs = RequestCosts(5, 1.0, (1.0, 1.0), 20, (0.0, 0.0))
    tree, outlook = DraftTree(1, 3), OutlookTracker(None).now((0.0, 0.0))
    assert learned.choose(SchedulingState(tree, 1, (), SETTINGS, 9, costs, outlook)) == action


def test_a_possible_margin_is_followed() -> None:
    result = Decoder(TARGET, drafters("na"), scheduler(0.5), SETTINGS, FREE, 1.0, fallback=BEST_FIXED).generate(
        PROMPT, 20
    )
    assert result.metrics.fallbacks == 0
    assert result.metrics.calls[0] == 0 < result.metrics.calls[1]
