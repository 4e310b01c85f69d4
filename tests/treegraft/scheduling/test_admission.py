"""A request calls a drafter only if the pass over its prompt can pay; decoder and replay agree on which do."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pipeline.evaluate import decisions
from pipeline.labelled import Admission, decide
from tests.treegraft.test_decoder import FREE, SETTINGS, TARGET, drafters
from tests.treegraft.tiny_scheduler import make_scheduler
from tests.treegraft.values.toy import random_tables
from treegraft.api import TreeGraft
from treegraft.costs import LatencyCurve
from treegraft.decoder import Decoder, request_costs
from treegraft.errors import UserError
from treegraft.scheduling.admission import Saving, prompt_passes
from treegraft.scheduling.checkpoint import load_scheduler, save_scheduler
from treegraft.scheduling.features import feature_names
from treegraft.scheduling.network import MarginNetwork
from treegraft.scheduling.policy import LearnedScheduler

NAMES = feature_names(SETTINGS.depth, 2)
PROMPT = [2, 3, 4, 2, 3]
DEAR = replace(FREE, drafter_prefill=(None, LatencyCurve([1, 8], [1], [[0.1], [7.1]])))  # 1 ms a token


def eager(outputs: int = 1, features: int = len(NAMES)) -> MarginNetwork:
    """Wants to call everywhere, the later drafters more."""
    biases = np.linspace(0.5, 1.0, outputs, dtype=np.float32)
    return MarginNetwork([np.zeros((features, outputs), np.float32)], [biases], np.zeros(features), np.ones(features))


@pytest.mark.parametrize(("saving_ms", "new_tokens", "calls"), [(0.4, 20, True), (0.3, 10, False), (-1.0, 20, False)])
def test_a_request_calls_where_the_pass_over_its_prompt_can_pay(saving_ms: float, new_tokens: int, calls: bool) -> None:
    """The pass takes 4 ms, one for each token before the root."""
    assert request_costs(DEAR, len(PROMPT), new_tokens).prompt_ms == pytest.approx((4.0,))
    scheduler = LearnedScheduler(eager(), NAMES, NAMES, Saving((1,), (saving_ms,)))
    decoder = Decoder(TARGET, drafters("na"), scheduler, SETTINGS, DEAR, 1.0)
    metrics = decoder.generate(PROMPT, new_tokens).metrics
    assert (metrics.calls[1] > 0) == calls
    assert (metrics.processed[decoder.drafters[1].name] > 0) == calls
    again = decoder.generate(PROMPT * 20, new_tokens).metrics  # the next request is weighed anew: 100 ms
    assert again.calls[1] == 0


def test_what_calls_save_depends_on_the_length_of_the_prompt() -> None:
    saving = Saving((10, 1000), (8.0, 2.0))
    np.testing.assert_allclose(saving.at([10, 100, 1000]), [8.0, 5.0, 2.0])  # 100 is halfway in logs
    np.testing.assert_array_equal(saving.at([1, 5000]), [8.0, 2.0])
    assert saving.at(100) == pytest.approx(5.0)
    np.testing.assert_array_equal(Saving((7,), (3.0,)).at([1, 7, 900]), 3.0)


@pytest.mark.parametrize(
    ("lengths", "ms"), [((), ()), ((5,), (1.0, 2.0)), ((5, 5), (1.0, 2.0)), ((9, 5), (1.0, 2.0)), ((0, 5), (1.0, 2.0))]
)
def test_a_saving_without_rising_lengths_is_refused(lengths: tuple[int, ...], ms: tuple[float, ...]) -> None:
    with pytest.raises(UserError, match="must rise"):
        Saving(lengths, ms)


def test_a_request_is_weighed_by_the_saving_of_its_own_length() -> None:
    """Passes take 4 and 99 ms; 20 tokens save 2 ms after the short prompt, 200 after the long one."""
    scheduler = LearnedScheduler(eager(), NAMES, NAMES, Saving((5, 100), (0.1, 10.0)))
    decoder = Decoder(TARGET, drafters("na"), scheduler, SETTINGS, DEAR, 1.0)
    for prompt, calls in ((PROMPT, False), (PROMPT * 20, True), (PROMPT, False)):
        assert (decoder.generate(prompt, 20).metrics.calls[1] > 0) == calls


def test_replay_weighs_every_prompt_and_every_drafter_by_itself() -> None:
    tables = random_tables(0, m=3)
    tables = replace(tables, prompt_tokens=np.array([20, 200, 30]))
    costs = replace(tables.costs, drafter_prefill=(None, *tables.costs.drafter_prefill[1:2], DEAR.drafter_prefill[1]))
    tables = replace(tables, costs=costs)
    network = eager(2, len(tables.feature_names))
    assert (decide(network, tables) == 2).all()
    # Passes take about 0.25, 3 and 0.4 ms in drafter 1, and 20, 200 and 30 in drafter 2; calls can save 2.5 x 10.
    actions = decide(network, tables, Admission(Saving((1,), (2.5,)), 10))
    for prompt, action in enumerate([2, 1, 1]):
        assert (actions[tables.prompt_of == prompt] == action).all()
    assert (decide(network, tables, Admission(Saving((1,), (0.0,)), 10)) == 0).all()
    # The same passes where calls save 0.1, 50 and about 9 ms in all, and where they save 50, 0.1 and about 41 ms.
    for saving, expected in (((0.01, 5.0), [0, 1, 1]), ((5.0, 0.01), [2, 0, 2])):
        actions = decide(network, tables, Admission(Saving((20, 200), saving), 10))
        for prompt, action in enumerate(expected):
            assert (actions[tables.prompt_of == prompt] == action).all()


def test_evaluation_replays_what_it_measures() -> None:
    """The replay beside a measurement weighs requests by the checkpoint's saving and the measured length."""
    tables = random_tables(0)
    passes = prompt_passes(tables.costs, tables.prompt_tokens)[:, 0]
    network = eager(1, len(tables.feature_names))
    for new_tokens, calling in ((10, True), (1, False)):  # a saving of 1/5 of the dearest pass a token
        bench = SimpleNamespace(
            network=network,
            tables={"test": tables},
            scheduler=SimpleNamespace(saving=Saving((1,), (passes.max() / 5,))),
            config=SimpleNamespace(evaluate=SimpleNamespace(max_new_tokens=new_tokens)),
        )
        assert (decisions(bench) == calling).all()  # type: ignore[arg-type]


@pytest.mark.parametrize("saving_ms", [1000.0, -1.0])
def test_a_loaded_scheduler_weighs_by_its_checkpoint(saving_ms: float, tmp_path: Path) -> None:
    folder = make_scheduler(tmp_path)
    network, config = load_scheduler(folder)
    save_scheduler(folder, network, replace(config, saving=Saving((1,), (saving_ms,))))
    graft = TreeGraft.from_pretrained(folder, device="cpu")
    graft.generate(torch.tensor([[2, 3, 4, 2, 3]]), max_new_tokens=20)
    assert graft.last_metrics is not None
    assert (graft.last_metrics.calls[1] > 0) == (saving_ms > 0)
