"""Scheduler checkpoints: byte-stable, whole after a kill, and strict about all that they hold."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from tests.treegraft.scheduling.test_network import random_network
from treegraft.errors import UserError
from treegraft.scheduling import checkpoint
from treegraft.scheduling.admission import Saving
from treegraft.scheduling.checkpoint import SchedulerConfig, check_fits, digest_of, load_scheduler, save_scheduler
from treegraft.scheduling.features import feature_names
from treegraft.scheduling.network import MarginNetwork
from treegraft.settings import NgramSettings

DEPTH = 2
NAMES = tuple(feature_names(DEPTH, 2))
COSTS = {"target": {"new_tokens": [1, 2], "ms": [31.0, 33.5]}}


def make(seed: int = 0, hidden: tuple[int, ...] = (6, 3), **changes: Any) -> tuple[MarginNetwork, SchedulerConfig]:
    """A small network and the configuration that goes with it."""
    network = random_network((len(NAMES), *hidden, 1), seed)
    config = SchedulerConfig(
        pair="toy",
        drafters=("ngram", "strong"),
        feature_names=NAMES,
        means=tuple(network.means.tolist()),
        scales=tuple(network.scales.tolist()),
        hidden=hidden,
        depth=DEPTH,
        width=4,
        look_back=4,
        ngram=NgramSettings(),
        verified_sizes=(0, 1, 2, 4),
        rate_tokens_per_ms=0.05,
        saving=Saving((8, 900), (1.5, 0.5)),
        best_fixed=(1, 0),
        calibration={"temperature": {"strong": 1.1}},
        cost_model=COSTS,
        cost_model_digest=digest_of(COSTS),
        tokenizer_hashes={"target": "a" * 64, "strong": "a" * 64},
        replay={"validation": {"plain": 0.03, "student": 0.05}, "test": {"plain": 0.03, "student": None}},
        provenance={"data": {"train_prompts": 40, "kinds": ["chat", "maths"]}},
    )
    return network, replace(config, **changes)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_round_trip(tmp_path: Path) -> None:
    network, config = make()
    stored = save_scheduler(tmp_path / "s", network, config)
    loaded, read = load_scheduler(tmp_path / "s")
    assert read == stored == replace(config, weights_sha256=stored.weights_sha256)
    features = np.random.default_rng(0).normal(size=(9, len(NAMES)))
    np.testing.assert_array_equal(loaded.margins(features), network.margins(features))
    assert read.draft_settings.depth == DEPTH


def test_equal_schedulers_have_equal_bytes_and_a_reload_saves_the_same(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_scheduler(tmp_path / name, *make())
    save_scheduler(tmp_path / "c", *load_scheduler(tmp_path / "a"))
    assert set(contents(tmp_path / "a")) == {"model.safetensors", "config.json", "README.md"}
    assert contents(tmp_path / "a") == contents(tmp_path / "b") == contents(tmp_path / "c")


def test_a_second_save_replaces_everything(tmp_path: Path) -> None:
    save_scheduler(tmp_path / "old", *make(seed=0, hidden=(9,)))
    save_scheduler(tmp_path / "old", *make(seed=1))
    save_scheduler(tmp_path / "fresh", *make(seed=1))
    assert contents(tmp_path / "old") == contents(tmp_path / "fresh")


def test_an_onnx_file_stays_beside_the_very_scheduler_that_it_was_made_of(tmp_path: Path) -> None:
    """Weights alone do not tell: means, scales and names are in the configuration."""
    network, config = make()
    moved = MarginNetwork(network.weights, network.biases, network.means + 1, network.scales)
    for other in (make(seed=1), (moved, replace(config, means=tuple(moved.means.tolist())))):
        save_scheduler(tmp_path, network, config)
        (tmp_path / "model.onnx").write_bytes(b"of the first")
        save_scheduler(tmp_path, network, config)
        assert (tmp_path / "model.onnx").read_bytes() == b"of the first"
        save_scheduler(tmp_path, *other)
        assert set(contents(tmp_path)) == {"model.safetensors", "config.json", "README.md"}


def test_a_refused_save_leaves_the_onnx_file(tmp_path: Path) -> None:
    network, config = make()
    save_scheduler(tmp_path, network, config)
    (tmp_path / "model.onnx").write_bytes(b"good")
    with pytest.raises(UserError):
        save_scheduler(tmp_path, network, replace(config, depth=3))
    assert (tmp_path / "model.onnx").exists()


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_a_kill_while_saving_leaves_a_whole_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renames: int
) -> None:
    """Before the first rename it is the earlier one, after it the new one: never a mixture."""
    old, new = make(seed=0, hidden=(9,)), make(seed=1)
    save_scheduler(tmp_path, *old)
    (tmp_path / "model.onnx").write_bytes(b"of the earlier one")
    done = 0

    def killed(source: Path, target: Path) -> None:
        nonlocal done
        if done == renames:
            raise KeyboardInterrupt
        done += 1
        source.rename(target)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            save_scheduler(tmp_path, *new)
    assert not (tmp_path / "model.onnx").exists()
    expected = new if renames else old
    network, config = load_scheduler(tmp_path)
    assert config.hidden == expected[1].hidden
    np.testing.assert_array_equal(network.weights[0], expected[0].weights[0])
    save_scheduler(tmp_path, *new)
    assert set(contents(tmp_path)) == {"model.safetensors", "config.json", "README.md"}


def test_a_kill_during_the_very_first_save_leaves_a_refusal_or_a_whole_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(source: Path, target: Path) -> None:
        if target.name == "config.json":
            raise KeyboardInterrupt
        source.rename(target)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            save_scheduler(tmp_path, *make())
    assert load_scheduler(tmp_path)[1].pair == "toy"


# --- refusals on loading ---------------------------------------------------------------------------------------------


def edited(folder: Path, **changes: Any) -> None:
    """Change config.json of a good checkpoint."""
    save_scheduler(folder, *make())
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | changes))


def rewritten(folder: Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    """Change the tensors of a good checkpoint, and the digest with them."""
    save_scheduler(folder, *make())
    tensors = {name: array.copy() for name, array in safetensors.numpy.load_file(folder / "model.safetensors").items()}
    change(tensors)
    data = safetensors.numpy.save(tensors)
    (folder / "model.safetensors").write_bytes(data)
    values = json.loads((folder / "config.json").read_text())
    values["weights_sha256"] = hashlib.sha256(data).hexdigest()
    (folder / "config.json").write_text(json.dumps(values))


def refusal(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        load_scheduler(folder)
    message = str(caught.value)
    assert message.endswith(".")
    assert "\n" not in message
    return message


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_refuses_a_missing_file(tmp_path: Path, name: str) -> None:
    save_scheduler(tmp_path, *make())
    (tmp_path / name).unlink()
    assert f"{name} does not exist" in refusal(tmp_path)


@pytest.mark.parametrize("text", ['{"schema": ', "\xff\xfe", ""])
def test_refuses_bad_json(tmp_path: Path, text: str) -> None:
    save_scheduler(tmp_path, *make())
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    assert "is not valid JSON" in refusal(tmp_path)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_refuses_numbers_that_json_does_not_have(tmp_path: Path, number: str) -> None:
    save_scheduler(tmp_path, *make())
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace("0.05,", f"{number},", 1))
    assert f"holds {number}" in refusal(tmp_path)


@pytest.mark.parametrize("text", ["[]", "3", '{"schema": "treegraft.scheduler/99"}', "{}"])
def test_refuses_an_unknown_schema(tmp_path: Path, text: str) -> None:
    save_scheduler(tmp_path, *make())
    (tmp_path / "config.json").write_text(text)
    assert "this version of TreeGraft reads 'treegraft.scheduler/1'" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"depht": 4}, "depht"),
        ({"depth": "2"}, "depth"),
        ({"depth": None}, "depth"),
        ({"means": [0.0]}, f"means has 1 numbers for {len(NAMES)} features"),
        ({"scales": [1.0] * (len(NAMES) + 1)}, f"scales has {len(NAMES) + 1} numbers"),
        ({"scales": [1.0] * (len(NAMES) - 1) + [0.0]}, f"scale of feature {NAMES[-1]} is 0.0"),
        ({"scales": [-1.0] + [1.0] * (len(NAMES) - 1)}, f"scale of feature {NAMES[0]} is -1.0"),
        ({"scales": [1e-60] + [1.0] * (len(NAMES) - 1)}, "must be above 0"),
        ({"feature_names": ["moon_phase", *NAMES[1:]]}, "does not know the feature(s) moon_phase"),
        ({"feature_names": list(NAMES[1:])}, f"the feature(s) {NAMES[0]}, which every scheduler has"),
        ({"feature_names": list(NAMES[:-1])}, f"means has {len(NAMES)} numbers for {len(NAMES) - 1} features"),
        ({"feature_names": [*NAMES[1:], NAMES[0]]}, "not in this version's order"),
        ({"drafters": ["ngram"]}, "at least two different ones"),
        ({"best_fixed": [0]}, "best_fixed is [0]"),
        ({"best_fixed": [0, 2]}, "each from 0 to 1"),
        ({"verified_sizes": [3, 1]}, "verified_sizes"),
        ({"ngram": {"max_mach": 4}}, "ngram.max_mach"),
        ({"rate_tokens_per_ms": 0.0}, "rate_tokens_per_ms is 0.0"),
        ({"cost_model": {}}, "cost_model_digest"),
        ({"tokenizer_hashes": {"strong": "a" * 64}}, "tokenizer_hashes must name the target"),
        ({"hidden": [6, 0]}, "width 0"),
        ({"hidden": [6, 4]}, "layers.1.weight has shape [6, 3], expected [6, 4]"),
        ({"hidden": [6]}, "layers.2.bias, layers.2.weight, which config.json does not call for"),
        ({"weights_sha256": "0" * 64}, "is not the file that config.json beside it was written with"),
    ],
)
def test_refuses_what_does_not_fit(tmp_path: Path, changes: dict[str, Any], part: str) -> None:
    edited(tmp_path, **changes)
    assert part in refusal(tmp_path)


def test_refuses_a_wrong_shape_and_says_which(tmp_path: Path) -> None:
    rewritten(tmp_path, lambda tensors: tensors.update({"layers.1.weight": np.zeros((6, 5), np.float32)}))
    assert "tensor layers.1.weight has shape [6, 5], expected [6, 3]" in refusal(tmp_path)


def test_refuses_a_missing_tensor_and_another_type(tmp_path: Path) -> None:
    rewritten(tmp_path, lambda tensors: tensors.update({"layers.9.bias": tensors.pop("layers.0.bias")}))
    assert "lacks the tensor(s) layers.0.bias" in refusal(tmp_path)
    rewritten(tmp_path, lambda tensors: tensors.update({"layers.0.bias": np.zeros(6, np.float64)}))
    assert "tensor layers.0.bias is float64, expected float32" in refusal(tmp_path)


def test_counts_values_that_are_not_finite_and_says_where(tmp_path: Path) -> None:
    def spoil(tensors: dict[str, np.ndarray]) -> None:
        tensors["layers.1.weight"][2, 1] = np.nan
        tensors["layers.1.weight"][5, 0] = np.inf

    rewritten(tmp_path, spoil)
    assert "layers.1.weight has 2 of 18 values that are NaN or infinite, the first at [2, 1]" in refusal(tmp_path)


@pytest.mark.parametrize("length", [0, 5, 100])
def test_refuses_torn_weights(tmp_path: Path, length: int) -> None:
    save_scheduler(tmp_path, *make())
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:length])
    assert "is not a safetensors file" in refusal(tmp_path)


# --- refusals on saving ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"calibration": {"a": [1.0, float("nan")]}}, "calibration.a[1] is nan"),
        ({"rate_tokens_per_ms": float("inf")}, "rate_tokens_per_ms is inf"),
        ({"means": (0.0,) * len(NAMES)}, "means of the network"),
        ({"hidden": (6,)}, "layers.2"),
        ({"depth": 3}, "called1_layer3"),
    ],
)
def test_does_not_write_what_it_would_not_read(tmp_path: Path, changes: dict[str, Any], part: str) -> None:
    network, config = make()
    with pytest.raises(UserError, match=part.replace("[", r"\[").replace("]", r"\]")):
        save_scheduler(tmp_path / "s", network, replace(config, **changes))
    assert not (tmp_path / "s").exists()


# --- against the live pair -------------------------------------------------------------------------------------------


def test_check_fits_says_what_differs() -> None:
    _, config = make()
    live: dict[str, Any] = {
        "tokenizer_hashes": dict(config.tokenizer_hashes),
        "depth": DEPTH,
        "width": 4,
        "drafters": ["ngram", "strong"],
    }
    check_fits(config, **live)
    for changes, part in (
        ({"depth": 5}, "made for depth 2, not 5"),
        ({"width": 10}, "made for width 4, not 10"),
        ({"drafters": ["ngram", "other"]}, "drafters ngram, strong, not ngram, other"),
        ({"drafters": ["strong", "ngram"]}, "not strong, ngram"),
        ({"tokenizer_hashes": {"target": "a" * 64}}, "the models strong, target, not target"),
        ({"tokenizer_hashes": live["tokenizer_hashes"] | {"strong": "b" * 64}}, "tokenizer of strong"),
    ):
        with pytest.raises(UserError, match=part) as caught:
            check_fits(config, **(live | changes))
        assert str(caught.value).endswith(".")
        assert ". " not in str(caught.value)


def test_the_card_says_what_a_user_needs() -> None:
    _, config = make()
    text = checkpoint.card(config)
    for part in (
        "train prompts: 40",
        "chat, maths",
        "| student | 0.05000 | 1.667 | - | - |",
        "load_scheduler",
        "`pipeline onnx toy` adds `model.onnx`",
        "Limits",
    ):
        assert part in text
    bare = checkpoint.card(replace(config, replay={}, provenance={}))
    assert "not recorded" in bare.lower()
