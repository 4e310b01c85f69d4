"""All stages on a tiny pair: what comes out, that a kill changes nothing, and that bad input ends in one sentence."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.cli import main
from pipeline.evaluate import _scratch, replayed, tuned_strong
from pipeline.files import file_digest
from pipeline.label_work import Turn
from pipeline.measurements import OWN_METHODS
from pipeline.methods import Bench, prepare
from pipeline.pair import machine
from pipeline.params_file import load_pair
from pipeline.prompts import Prompt, select_prompts
from pipeline.stages import STAGES
from pipeline.strong_baseline import StrongAlone, tune_strong
from tests.pipeline.tiny_pair import SLUG, contents, make_pair
from treegraft.decoder import Decoder, Generation
from treegraft.metrics import DecodingMetrics
from treegraft.pair import encode_turns
from treegraft.scheduling.admission import Saving
from treegraft.scheduling.checkpoint import load_scheduler, save_scheduler
from treegraft.scheduling.features import feature_names
from treegraft.scheduling.network import MarginNetwork
from treegraft.values.replay import joint_rate, replay_fixed
from treegraft.values.states import code

REPO = Path(__file__).resolve().parents[2]


def stage(name: str, *arguments: str) -> int:
    """Exit code of one stage, run in this process."""
    return main([name, SLUG, *arguments])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which every stage has run once."""
    root = make_pair(tmp_path_factory.mktemp("pair"))
    before = Path.cwd()
    os.chdir(root)
    try:
        for name in STAGES:
            assert stage(name) == 0, name
    finally:
        os.chdir(before)
    return root


def test_every_stage_leaves_its_results(finished: Path) -> None:
    report = json.loads((finished / f"reports/{SLUG}/report.json").read_text())
    assert set(report["benchmarks"]) == {"alpha", "beta"}
    for methods in report["benchmarks"].values():
        assert methods["plain"]["speedup"]["mean"] == 1
        assert methods["plain"]["tokens_per_step"] == 1
        for name, method in methods.items():
            assert method["tokens"] == methods["plain"]["tokens"], name
    assert report["identity"]["divergences"] == 0
    assert report["identity"]["dtype"] == "float32"
    assert report["oracle"]["over_best_single"] >= 1
    folder = finished / f"models/schedulers/{SLUG}"
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors", "README.md"}
    page = (finished / f"reports/{SLUG}/report.html").read_text()
    steps = [step for prompt in report["steps"] for step in prompt["steps"]]
    assert {prompt["bench"] for prompt in report["steps"]} == {"alpha", "beta"}
    assert page.count('<svg class="tree" ') == page.count("<details") == len(steps) > 0
    assert {layer["action"] for step in steps for layer in step["layers"]} <= {0, 1}
    assert not list((finished / ".treegraft").rglob("answers"))


def test_the_report_says_where_its_figures_come_from(finished: Path) -> None:
    from pipeline.files import file_digest
    from pipeline.headline import doubts

    report = json.loads((finished / f"reports/{SLUG}/report.json").read_text())
    provenance = report["provenance"]
    assert provenance["code_changed"] == []
    # None, unless this machine is so busy that its clock contradicts the profile.
    replayed = json.loads((finished / f"data/evaluation/{SLUG}/summary.json").read_text())["replay"]["tokens_per_ms"]
    clock = report["overall"]["plain"]["tokens_per_s"]
    assert report["warnings"] == doubts(SLUG, [], 1000 * replayed["plain"], clock, 0)
    for name, path in (
        ("traces", f"data/traces/{SLUG}/manifest.json"),
        ("profile", f"data/profiles/{SLUG}.json"),
        ("scheduler", f"models/schedulers/{SLUG}/config.json"),
    ):
        assert provenance["inputs"][name] == file_digest(finished / path)
    assert all(len(provenance[name]) == 64 for name in ("code_digest", "params_digest"))
    assert provenance["started"] <= provenance["ended"] == report["created"]
    assert report["hardware"]["threads"] == 1
    page = (finished / "reports/index.html").read_text()
    assert f'href="{SLUG}/report.html"' in page
    assert report["headline"]["text"] in page


def test_the_drafter_s_hits_are_what_its_calls_achieved(finished: Path) -> None:
    """Features say how often its proposals held the next token; outcomes, whether a call in the first layer got it."""
    folder = finished / f"data/outcomes/{SLUG}"
    manifest = json.loads((folder / "manifest.json").read_text())
    usual = json.loads((folder / "calibration.json").read_text())["hits"][1]
    depth = manifest["decoding"]["depth"]
    column = feature_names(depth, 2).index("drafter1_hits")
    positions = hits = turns = 0
    for turn in manifest["turns"]:
        with np.load(folder / turn["file"]) as stored:
            told, accepted = stored["features"][:, 0, column].astype(float), stored["accepted"]
        assert told[0] == pytest.approx(usual)
        got = accepted[:-1, code((1, *[0] * (depth - 1)), 2), -1] >= 1
        np.testing.assert_allclose(np.diff(told), 0.1 * (got - told[:-1]), atol=1e-5)
        if turn["split"] == "train":
            positions, hits, turns = positions + len(told), hits + int(got.sum()), turns + 1
    assert 0 < hits < positions - turns
    assert hits <= usual * positions <= hits + turns  # the last token of a turn is not told


def test_the_strong_drafter_is_replayed_at_the_depth_that_is_measured(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(finished)
    bench = prepare(load_pair(SLUG))
    found = []
    for depth in range(1, bench.config.decoding.depth + 1):
        plan = (1,) * depth  # layers that it leaves out skip
        rate = joint_rate([replay_fixed(bench.tables[split], plan) for split in ("train", "validation")])
        found.append(replay_fixed(bench.tables["test"], plan, rate).tokens_per_ms)
        assert replayed(bench, StrongAlone(1, depth, 0.0))["tokens_per_ms"]["strong"] == found[-1]
    assert len(set(found)) == len(found) > 1
    summary = json.loads(Path(f"data/evaluation/{SLUG}/summary.json").read_text())
    deepest = min(summary["settings"]["strong_depth"][0], len(found))  # that tables know
    assert summary["replay"]["tokens_per_ms"]["strong"] == found[deepest - 1]


def test_the_strong_drafter_alone_has_the_rate_of_its_steps_as_the_others_have(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt's share of a request is no price of a verified node: a prompt of five seconds changes nothing.

    And it may be deeper than the method, here by two layers.
    """
    monkeypatch.chdir(finished)
    generate = Decoder.generate

    def timed(self: Decoder, *arguments: Any) -> Generation:
        made = generate(self, *arguments)
        drafted = self.settings.depth
        slow = 1 < drafted < min(best, depth)  # the best depth must be found behind a worse one
        metrics = DecodingMetrics(tokens=1 if slow else 10 * min(drafted, best), seconds=6.0, prefill_ms=5000.0)
        return replace(made, metrics=metrics)

    monkeypatch.setattr(Decoder, "generate", timed)
    bench = prepare(load_pair(SLUG))
    prompts = [np.array([1, 5, 9]), np.array([1, 7])]
    depth = bench.config.decoding.depth
    for best in (2, depth, depth + 2):
        found = tune_strong(bench, prompts, 0.0, 1.0)
        assert (found.drafter, found.depth) == (1, best)
        assert found.tokens_per_ms == pytest.approx(10 * best / 1000)


def test_the_strong_drafter_alone_is_tuned_on_every_kind(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(finished)
    bench = prepare(load_pair(SLUG))
    validation = select_prompts(bench.config.prompts.sources, bench.config.label)["validation"]
    texts: list[list[int]] = []

    def tune(bench: Bench, prompts: list[np.ndarray], temperature: float, guess: float) -> StrongAlone:
        texts.extend(prompt.tolist() for prompt in prompts)
        return StrongAlone(1, 2, guess)

    monkeypatch.setattr("pipeline.evaluate.tune_strong", tune)
    found = tuned_strong(bench, validation, 0.0, tmp_path / "strong.json")
    assert (found.drafter, found.depth) == (1, 2)
    encoded = {prompt.kind: encode_turns(bench.models.target, prompt.turns[:1], []).tolist() for prompt in validation}
    assert set(encoded) == {"alpha", "beta"}
    assert all(text in texts for text in encoded.values())


def test_a_measurement_of_another_machine_is_not_continued(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(finished)
    config = load_pair(SLUG)
    here = machine(config)
    before = _scratch(config, {})
    monkeypatch.setattr("pipeline.pair.machine", lambda config: here | {"versions": {"torch": "0"}})
    assert _scratch(config, {}) != before


@pytest.fixture
def copy_of(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the finished pair to change at will, as working directory."""
    root = Path(shutil.copytree(finished, tmp_path / "pair"))
    monkeypatch.chdir(root)
    return root


def test_models_of_another_pair_in_the_same_place_are_refused(
    copy_of: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = copy_of / f"models/manifests/{SLUG}/fetch.json"
    known = json.loads(manifest.read_text())
    known["models"]["tiny-target"]["digest"] = "0" * 64
    manifest.write_text(json.dumps(known))
    for name in ("profile", "label", "evaluate"):
        Path(f".treegraft/{SLUG}/labelled.json").unlink(missing_ok=True)
        assert stage(name) == 2
        assert "holds another model than this pair fetched" in capsys.readouterr().err


def test_what_the_scheduler_was_made_with_is_not_measured(copy_of: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A prompt is taken out of the file, so the rule that splits in the middle moves a training prompt to the test."""
    path = copy_of / "data/prompts/alpha.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[: len(lines) // 2]))
    assert stage("evaluate") == 2
    assert "is to be measured, but it is among those that the scheduler was made with" in capsys.readouterr().err


def test_other_answers_than_the_labelled_ones_are_not_predicted(copy_of: Path) -> None:
    assert stage("evaluate", "--set", "evaluate.max_new_tokens=3", "--set", "evaluate.hf_baselines=false") == 0
    summary = json.loads((copy_of / f"data/evaluation/{SLUG}/summary.json").read_text())
    assert summary["replay"] is summary["calibration"] is None
    assert stage("report") == 0


def test_every_turn_has_a_file_of_its_own() -> None:
    ids = ["qa/hard-1", "qa-hard/1", "qa/a/1", "qa/a-1", "qa/a b", "qa/a?b", "qa/7", "qa/%"]
    turns = [Turn("test", Prompt(i, "qa", ("x",)), 0, np.zeros(2), 1, np.zeros((1, 0)), np.zeros(1)) for i in ids]
    assert len({turn.file.lower() for turn in turns}) == len(ids)
    assert turns[6].file == "test/qa-7-0.npz"


def test_outcomes_that_are_incomplete_or_another_work_s_are_made_again(copy_of: Path) -> None:
    outcomes = copy_of / f"data/outcomes/{SLUG}"
    before = contents(outcomes)
    manifest = json.loads((outcomes / "manifest.json").read_text())
    some = outcomes / manifest["turns"][0]["file"]
    assert manifest["turns"][0]["sha256"] == file_digest(some)
    some.unlink()
    assert stage("label") == 0
    assert contents(outcomes) == before


def test_every_temperature_is_lossless_with_seeds_that_methods_share(copy_of: Path) -> None:
    settings = ["--set", "evaluate.temperatures=[0.0, 1.0]", "--set", "evaluate.repeats=2"]
    assert stage("evaluate", *settings) == 0
    assert stage("report", *settings) == 0
    lines = (copy_of / f"data/evaluation/{SLUG}/runs.jsonl").read_text().splitlines()
    texts: dict[tuple[float, int, str, int], dict[str, tuple[int, list[int]]]] = {}
    for row in map(json.loads, lines):
        place = (row["temperature"], row["repeat"], row["prompt_id"], row["turn"])
        texts.setdefault(place, {})[row["method"]] = (row["seed"], row["token_ids"])
    for place, by_method in texts.items():
        assert len({by_method[method][0] for method in by_method}) == 1, place
        assert {tuple(by_method[method][1]) for method in OWN_METHODS} == {tuple(by_method["plain"][1])}, place
    for temperature in (0.0, 1.0):
        pairs = [
            (by_method["plain"][1], texts[temperature, 1, *place[2:]]["plain"][1])
            for place, by_method in texts.items()
            if place[:2] == (temperature, 0)
        ]
        assert len(pairs) > 3
        assert any(first != second for first, second in pairs) == (temperature > 0), "repeats draw other numbers"
    report = json.loads((copy_of / f"reports/{SLUG}/report.json").read_text())
    (sampled,) = report["other_temperatures"]
    for part, temperature in ((report, 0), (sampled, 1)):
        assert part["headline"]["text"].startswith(f"At temperature {temperature} ")
        assert part["identity"]["divergences"] == 0
        assert part["identity"]["compared_tokens"] == sum(
            len(by_method[method][1])
            for place, by_method in texts.items()
            if place[0] == temperature
            for method in OWN_METHODS[1:]
        )
    assert sampled["identity"]["by_method"]["hf_assisted"] is None
    assert sampled["headline"]["text"] in (copy_of / f"reports/{SLUG}/report.html").read_text()


def test_a_scheduler_that_always_calls_is_reported_as_a_loss(copy_of: Path) -> None:
    """On a clock that charges a call five forwards of the target, more than it can gain."""
    folder = copy_of / f"models/schedulers/{SLUG}"
    network, config = load_scheduler(folder)
    weights = [np.zeros_like(weight) for weight in network.weights]
    biases = [np.zeros_like(bias) for bias in network.biases[:-1]] + [np.ones_like(network.biases[-1])]
    eager = replace(config, saving=Saving((1,), (1e6,)))  # no prompt is too long for it
    save_scheduler(folder, MarginNetwork(weights, biases, network.means, network.scales), eager)
    assert stage("evaluate", "--set", "evaluate.hf_baselines=false") == 0
    runs = copy_of / f"data/evaluation/{SLUG}/runs.jsonl"
    rows = [json.loads(line) for line in runs.read_text().splitlines()]
    ours = [row for row in rows if row["method"] == "treegraft"]
    assert sum(row["strong_calls"] for row in ours) > 2 * sum(row["steps"] for row in ours)
    assert all(row["calls"][0] == 0 for row in ours), "it never skips"
    for row in rows:
        row["seconds"] = 0.01 * row["steps"] + 0.05 * row["strong_calls"]
    # Each prompt three times, since so few as there are would have no interval.
    more = [row | {"prompt_id": f"{row['prompt_id']}-{copy}"} for copy in range(3) for row in rows]
    runs.write_text("".join(json.dumps(row) + "\n" for row in more))
    assert stage("report") == 0
    headline = json.loads((copy_of / f"reports/{SLUG}/report.json").read_text())["headline"]
    assert headline["over_best_single"]["ratio"] < 1
    assert headline["over_best_single"]["verdict"] == "slower"
    assert "slower than the better single drafter" in headline["text"]


def test_traces_load_with_datasets_and_pandas(finished: Path) -> None:
    import datasets
    import pandas as pd

    folder = finished / f"data/traces/{SLUG}"
    files = {split: str(folder / f"states/{split}-*.parquet") for split in ("train", "validation", "test")}
    loaded = datasets.load_dataset("parquet", data_files=files, cache_dir=str(finished / "cache"))
    prompts = [set(loaded[split]["prompt_id"]) for split in files]
    assert all(prompts)
    assert len(set.union(*prompts)) == sum(map(len, prompts))
    frame = pd.read_parquet(sorted((folder / "schedules").glob("train-*.parquet"))[0])
    assert len(frame) % 8 == 0
    assert (frame["accepted"].map(max) <= frame["tokens_left"]).all()
    assert (frame["mean_accepted"].map(len) == 0).all()  # greedy text


def test_traces_have_no_fault_and_their_statistics_are_numbers(
    finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(finished)
    assert main(["validate", f"data/traces/{SLUG}"]) == 0
    assert "has no fault" in capsys.readouterr().out
    statistics = json.loads((finished / f"reports/{SLUG}/traces.json").read_text())
    manifest = json.loads((finished / f"data/traces/{SLUG}/manifest.json").read_text())
    for split, found in statistics.items():
        assert found["size"] == manifest["splits"][split]
        assert found["headroom"]["oracle_over_best_single"] >= 1
        assert 0 <= found["labels"]["tiny-drafter"]["pays"] <= 1
    profile = json.loads((finished / f"data/profiles/{SLUG}.json").read_text())
    assert set(profile["overheads"]) == {"light_ms", "scheduler_ms", "graft_ms", "step_ms"}
    assert profile["measured"]["tiny-target"]["held_out"]["new_tokens"] == [3]


def test_same_inputs_give_the_same_bytes(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Label, traces and distill again, from the same profile."""
    monkeypatch.chdir(finished)
    Path(f".treegraft/{SLUG}/labelled.json").unlink()  # or label would find that there is nothing to do
    for name, path in (
        ("label", f"data/outcomes/{SLUG}"),
        ("traces", f"data/traces/{SLUG}"),
        ("distill", f"models/schedulers/{SLUG}"),
    ):
        before = contents(Path(path))
        assert stage(name) == 0
        assert contents(Path(path)) == before


@pytest.mark.parametrize(
    ("name", "after"), [("label", 2), ("label", 20), ("distill", 1), ("evaluate", 3), ("evaluate", 8)]
)
def test_a_killed_stage_goes_on_where_it_was(
    finished: Path, monkeypatch: pytest.MonkeyPatch, name: str, after: int
) -> None:
    """kill -9 once some scratch files are there: the earlier outputs stay whole, the next run ends like any other."""
    monkeypatch.chdir(finished)
    folders = {"label": "data/outcomes", "distill": "models/schedulers", "evaluate": "data/evaluation"}
    output = Path(folders[name]) / SLUG
    before = contents(output)
    scratch = Path(f".treegraft/{SLUG}/{name}")
    Path(f".treegraft/{SLUG}/labelled.json").unlink(missing_ok=True)  # or label would find that there is nothing to do
    environment = os.environ | {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-m", "pipeline", name, SLUG], env=environment, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 120

    def pieces() -> int:
        found = [path for path in scratch.rglob("*") if path.is_file() and path.suffix != ".tmp"]
        return sum(path.read_bytes().count(b"\n") if path.suffix == ".jsonl" else 1 for path in found)

    while process.poll() is None and pieces() < after and time.monotonic() < deadline:
        time.sleep(0.005)
    assert process.poll() is None, process.stderr
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert contents(output) == before
    assert stage(name) == 0
    if name != "evaluate":
        assert contents(output) == before
    else:
        rows = [json.loads(line) for line in (output / "runs.jsonl").read_text().splitlines()]
        cells = [(row["prompt_id"], row["turn"], row["method"], row["repeat"]) for row in rows]
        assert len(cells) == len(set(cells)) == len(before["runs.jsonl"].splitlines())
        assert (output / "steps.jsonl").read_bytes() == before["steps.jsonl"]


@pytest.mark.parametrize(
    ("name", "arguments", "sentence"),
    [
        ("evaluate", ["--set", "decoding.depth=2"], "depth"),
        ("label", ["--set", "decoding.dept=2"], "depth"),
        ("label", ["--set", "prompts.sources=[nowhere]"], "nowhere"),
        ("evaluate", ["--set", "threads=2"], "profile"),
        ("evaluate", ["--set", "decoding.look_back=1"], "look_back"),
    ],
)
def test_bad_input_is_one_sentence(
    finished: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    arguments: list[str],
    sentence: str,
) -> None:
    monkeypatch.chdir(finished)
    before = contents(finished / "data")
    assert stage(name, *arguments) == 2
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert sentence in message
    assert "Traceback" not in message
    assert contents(finished / "data") == before
