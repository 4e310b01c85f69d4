"""Stage profile with a made-up clock: warm-up, medians, spread, held-out error, and whose profile it is."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline import profile
from pipeline.files import write_json
from pipeline.params import PairConfig
from pipeline.params_file import load_pair
from tests.pipeline.tiny_pair import SLUG, make_pair
from tests.treegraft.tiny import cost_model, tiny_language_model
from treegraft.costs import LatencyCurve
from treegraft.errors import UserError


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PairConfig:
    make_pair(tmp_path, profile={"new_tokens": [1, 2, 4, 8, 16], "context_lengths": [16, 64, 128], "repeats": 5})
    monkeypatch.chdir(tmp_path)
    return load_pair(SLUG)


class Clock:
    """In place of timed forwards: the first time at a point is cold, one round is slow, n tokens take ``law(n, c)``."""

    def __init__(self, law: Any) -> None:
        self.law = law
        self.times: dict[tuple[int, int], int] = {}

    def __call__(self, runner: Any, tokens: Any, store: Any, last_only: bool) -> float:
        point = (len(tokens), runner.committed)
        self.times[point] = seen = self.times.get(point, 0) + 1
        noise = {1: 1000.0, 2: 500.0, 3: -0.1, 4: 0.1}.get(seen, 0.0)
        return float(self.law(*point)) + noise


def measured(config: PairConfig, monkeypatch: pytest.MonkeyPatch, law: Any) -> dict[str, dict[str, Any]]:
    monkeypatch.setattr(profile, "_time_forward", Clock(law))
    return profile.measure(config, tiny_language_model(), is_drafter=False)


def test_medians_after_a_warm_up_with_their_spread(config: PairConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(config, monkeypatch, lambda n, c: 10 + n + c / 10)["nodes"]
    np.testing.assert_allclose(found["ms"], [[10 + n + c / 10 for c in (16, 64, 128)] for n in (1, 2, 4, 8, 16)])
    np.testing.assert_allclose(found["quartile_spread_ms"], 0.1)
    assert found["repeats"] == 5


def test_interpolation_is_checked_at_points_that_it_does_not_use(
    config: PairConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A law that is straight but for a bump at 3 new tokens: only that point is off, and by the bump."""
    found = measured(config, monkeypatch, lambda n, c: 10 + n + c / 10 + 5 * (n == 3))
    held_out = found["held_out"]
    assert (held_out["new_tokens"], held_out["context_length"]) == ([3, 12], 40)
    assert held_out["ms"] == [22.0, 26.0]
    assert held_out["interpolated_ms"] == [17.0, 26.0]
    np.testing.assert_allclose(held_out["relative_error"], [17 / 22 - 1, 0], atol=1e-4)
    assert 3 not in found["nodes"]["new_tokens"]
    line = profile.held_out_line(held_out)
    assert line == "interpolation is off by -22.7 % at 3, +0.0 % at 12 new tokens after 40"


@pytest.mark.parametrize(
    ("new_tokens", "contexts", "sizes", "between"),
    [
        ((1, 2, 4, 8, 16, 32, 64), [64, 256, 1024], (3, 12, 48), 160),
        ((1, 2, 4, 8), [16, 64], (3,), 40),
        ((1, 2), [16], (), 16),
    ],
)
def test_held_out_points_lie_between_those_of_the_grid(
    new_tokens: tuple[int, ...], contexts: list[int], sizes: tuple[int, ...], between: int
) -> None:
    assert profile.held_out_sizes(new_tokens) == sizes
    assert profile.middle(contexts) == between


def test_a_grid_without_a_gap_has_nothing_to_check(config: PairConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = config.model_copy(
        update={"profile": config.profile.model_copy(update={"new_tokens": (1, 2), "context_lengths": (16,)})}
    )
    found = measured(narrow, monkeypatch, lambda n, c: 1.0)
    assert found["held_out"]["relative_error"] == []
    assert "no point" in profile.held_out_line(found["held_out"])


def stored(config: PairConfig, **other: Any) -> None:
    from pipeline.pair import machine

    curve = LatencyCurve([1, 8], [64], [[1.0], [2.0]])
    write_json(
        config.paths.profile,
        {"schema": 1, "machine": machine(config) | other, "cost_model": cost_model(curve, (None, curve)).to_json()},
    )


def test_a_profile_of_this_machine_is_taken(config: PairConfig) -> None:
    stored(config)
    assert profile.load_costs(config).target.ms(1, 64) == 1.0
    about = json.loads(config.paths.profile.read_text())["machine"]
    assert (about["device"], about["threads"], about["dtype"]) == ("cpu", 1, "float32")
    assert {"torch", "transformers", "numpy", "python"} <= set(about["versions"])


@pytest.mark.parametrize(
    ("key", "value", "here"),
    [("device", "cuda", "cpu"), ("threads", 7, "1"), ("dtype", "bfloat16", "float32"), ("name", "abacus", "")],
)
def test_stage_traces_refuses_a_profile_of_another_machine(config: PairConfig, key: str, value: Any, here: str) -> None:
    from pipeline import traces

    stored(config, **{key: value})
    write_json(
        config.paths.outcomes / "manifest.json",
        {"decoding": config.decoding.model_dump(mode="json"), "drafters": ["a", "b"], "turns": []},
    )
    write_json(config.paths.outcomes / "calibration.json", {})
    with pytest.raises(UserError, match=f"measured with {key} {value}, but this run has {here}.*pipeline profile"):
        traces.run(config)
