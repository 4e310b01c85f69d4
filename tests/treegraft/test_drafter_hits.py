"""A drafter model's hits: how often its proposals held the latest tokens, where it went along the committed path."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.treegraft.test_decoder import SETTINGS, TARGET, drafters
from tests.treegraft.tiny_scheduler import make_scheduler
from treegraft.api import TreeGraft
from treegraft.decoder import Decoder
from treegraft.draft_vocabulary import UNKNOWN
from treegraft.drafters import LanguageModelDrafter
from treegraft.errors import UserError
from treegraft.scheduling.features import SchedulingState, feature_names, features
from treegraft.scheduling.policy import FixedSchedule, always, never
from treegraft.tree import NOT_PROCESSED, DraftTree, IntArray
from treegraft.values.calibration import Calibration, ModelFit

PROMPT = [2, 3, 4, 2, 3]
USUAL = 0.7
COLUMN = feature_names(SETTINGS.depth, 2).index("drafter1_hits")


class Noting:
    """Plays a fixed schedule and keeps what the first layer of every step is told of the drafter's hits."""

    def __init__(self, schedule: FixedSchedule) -> None:
        self.schedule = schedule
        self.told: list[float] = []

    def choose(self, state: SchedulingState) -> int:
        if state.layer == 1:
            self.told.append(features(state)[COLUMN])
        return self.schedule.choose(state)


def run(kind: str, schedule: FixedSchedule) -> tuple[list[float], list[tuple[list[int], int]]]:
    """What was told in each step; each step's tokens, and for how many of them the drafter had been there."""
    members = drafters("n" + kind)
    model = members[1]
    assert isinstance(model, LanguageModelDrafter)
    model.usual_hits = USUAL
    steps: list[tuple[list[int], int]] = []

    def note(tree: DraftTree, verified: IntArray, accepted: IntArray, tokens: IntArray) -> None:
        along = 0
        for node in [0, *accepted.tolist()]:
            if tree.row[1, node] == NOT_PROCESSED:
                break
            along += 1
        steps.append((tokens.tolist(), min(along, len(tokens))))

    scheduler = Noting(schedule)
    Decoder(TARGET, members, scheduler, SETTINGS, ignore_eos=True).generate(PROMPT, 40, on_step=note)
    return scheduler.told, steps


def test_a_perfect_drafter_always_hits() -> None:
    told, steps = run("t", always(SETTINGS.depth))
    seen = 0
    for value, (_, along) in zip(told, steps, strict=False):
        assert value == pytest.approx(1 - (1 - USUAL) * 0.9**seen)
        seen += along
    assert seen > 20


@pytest.mark.parametrize("kind", ["a", "r", "o"])
@pytest.mark.parametrize("schedule", [(1,), (1, 1, 1), (0, 1)])
def test_hits_are_counted_where_the_drafter_went_along(kind: str, schedule: tuple[int, ...]) -> None:
    """Against one forward of the drafter over the finished text."""
    told, steps = run(kind, FixedSchedule(schedule))
    model = drafters("n" + kind)[1]
    assert isinstance(model, LanguageModelDrafter)
    text = np.array(PROMPT + [token for tokens, _ in steps for token in tokens])
    with torch.inference_mode():
        logits = model.model.module(torch.from_numpy(text)[None]).logits[0, :, : model.vocabulary.size]
    proposed = model.vocabulary.of_columns(logits.topk(SETTINGS.width, dim=-1).indices.numpy())  # [S, width]
    expected, at, counted, hit = USUAL, len(PROMPT), 0, 0
    for value, (tokens, along) in zip(told, steps, strict=False):
        assert value == pytest.approx(expected)
        for i, token in enumerate(tokens[:along]):
            foreseen = token in proposed[at + i - 1]
            expected += 0.1 * (foreseen - expected)
            counted, hit = counted + 1, hit + foreseen
        at += len(tokens)
    assert counted > 5
    assert 0 < hit < counted or kind == "a"


def test_a_drafter_that_is_never_called_keeps_its_usual_hits() -> None:
    told, steps = run("a", never())
    assert set(told) == {USUAL}
    assert all(along == 0 for _, along in steps)


def test_every_request_begins_with_the_usual_hits() -> None:
    members = drafters("no")
    model = members[1]
    assert isinstance(model, LanguageModelDrafter)
    scheduler = Noting(always(SETTINGS.depth))
    decoder = Decoder(TARGET, members, scheduler, SETTINGS)
    for _ in range(2):
        begun = len(scheduler.told)
        decoder.generate(PROMPT, 12)
        assert scheduler.told[begun] == model.usual_hits
        assert model.hits != model.usual_hits


def test_a_loaded_scheduler_begins_with_its_calibration(tmp_path: Path) -> None:
    folder = make_scheduler(tmp_path)
    graft = TreeGraft.from_pretrained(folder, device="cpu")
    (model,) = (drafter for drafter in graft.decoder.drafters if isinstance(drafter, LanguageModelDrafter))
    assert model.usual_hits == 0.6  # tiny_scheduler.py


def test_the_calibration_counts_the_target_s_tokens_among_the_likeliest() -> None:
    fit = ModelFit(2)
    assert fit.hits() == 0.5  # nothing was seen
    logits = torch.tensor([[3.0, 2.0, 1.0], [1.0, 3.0, 2.0], [3.0, 1.0, 2.0], [3.0, 2.0, 1.0]])
    fit.add(logits, np.array([1, 0, 2, UNKNOWN]))  # second best, worst, second best, none of the drafter's
    assert fit.hits() == 0.5
    fit.add(logits[:2], np.array([0, 1]))
    assert fit.hits() == pytest.approx(4 / 6)


@pytest.mark.parametrize("hits", [[0.5], [0.5, 1.5], [0.5, -0.1], [0.5, float("nan")], "ab"])
def test_a_calibration_with_hits_that_are_no_shares_is_refused(hits: object) -> None:
    good = {"ngram_table": [[0.5]], "temperatures": [1.0, 1.1], "hits": [0.5, 0.9]}
    assert Calibration.from_json(good).hits == (0.5, 0.9)
    with pytest.raises(UserError, match="stage label again"):
        Calibration.from_json(good | {"hits": hits})
    with pytest.raises(UserError, match="stage label again"):
        Calibration.from_json({name: value for name, value in good.items() if name != "hits"})
