"""All stages on answers that are sampled: seeded by prompt, resumable, the same text in labelling and evaluation."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from pipeline import label, label_work
from pipeline.cli import main
from pipeline.label import LabelJob, make_job
from pipeline.label_work import Turn, answer
from pipeline.pair import load_pair_models
from pipeline.params_file import load_pair
from pipeline.stages import STAGES
from tests.pipeline.tiny_pair import SLUG, contents, make_pair
from tests.treegraft.reference import plain
from treegraft.sampling import SamplingSettings, prompt_seed

TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which every stage has run at the temperature."""
    root = make_pair(
        tmp_path_factory.mktemp("pair"),
        label={"temperature": TEMPERATURE},
        evaluate={"temperatures": [TEMPERATURE], "hf_baselines": False},
    )
    before = Path.cwd()
    os.chdir(root)
    try:
        for name in STAGES:
            assert main([name, SLUG]) == 0, name
    finally:
        os.chdir(before)
    return root


@pytest.fixture
def job(finished: Path, monkeypatch: pytest.MonkeyPatch) -> LabelJob:
    """The labelling of that folder, of which nothing is left half done and nothing known to be done; it runs there."""
    monkeypatch.chdir(finished)
    shutil.rmtree(finished / ".treegraft" / SLUG / "label", ignore_errors=True)
    (finished / ".treegraft" / SLUG / "labelled.json").unlink(missing_ok=True)
    return make_job(load_pair(SLUG))


def test_every_stage_leaves_its_results(
    finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(finished)
    folder = Path("data/traces") / SLUG
    assert main(["validate", str(folder)]) == 0
    assert "has no fault" in capsys.readouterr().out
    assert json.loads((folder / "manifest.json").read_text())["temperature"] == TEMPERATURE
    assert "Temperature of the answers 0.7." in (folder / "README.md").read_text()
    for path in (folder / "schedules").iterdir():
        frame = pd.read_parquet(path)
        means, sizes = np.stack(frame["mean_accepted"]), np.array([0, 1, 2, 4, 8])
        assert ((means >= 0) & (means <= sizes)).all()
        assert (np.diff(means, axis=1) >= 0).all()
        # Means over draws, not the draw of this text.
        realised = np.minimum(np.stack(frame["accepted"]), frame["tokens_left"].to_numpy()[:, None] - 1)
        assert (means != realised).any()
    scheduler = json.loads(Path(f"models/schedulers/{SLUG}/config.json").read_text())
    assert scheduler["provenance"]["data"]["temperature"] == TEMPERATURE
    report = json.loads(Path(f"reports/{SLUG}/report.json").read_text())
    assert report["identity"]["divergences"] == 0, "the same seed gives the same text, whoever drafts"
    assert report["replay"]["predicted_speedup"] > 0, "labelled and measured at one temperature"


def answered(job: LabelJob) -> list[Turn]:
    """All turns, each answered anew as stage label does it."""
    job.begin()
    models = load_pair_models(job.config)
    for _, prompt in job.prompts:
        answer(job.config, models, prompt, [job.answer_file(prompt, number) for number in range(len(prompt.turns))])
    return [turn for split, prompt in job.prompts for turn in job.turns_of(split, prompt)]


def test_answers_are_plain_sampled_decoding_in_labelling_and_evaluation(job: LabelJob) -> None:
    target = load_pair_models(job.config).target
    turns = answered(job)
    greedy = 0
    for turn in turns:
        prompt, text = turn.text[: turn.prompt_tokens], turn.text[turn.prompt_tokens :].tolist()
        sampling = SamplingSettings(TEMPERATURE, seed=prompt_seed(job.config.seed, prompt))
        assert text == plain(target, prompt.tolist(), 12, sampling)
        greedy += text == plain(target, prompt.tolist(), 12)
    assert greedy < len(turns) / 2
    seeds = {prompt_seed(seed, turn.text[: turn.prompt_tokens]) for turn in turns for seed in (0, 1)}
    assert len(seeds) == 2 * len(turns)
    rows = [json.loads(line) for line in Path(f"data/evaluation/{SLUG}/runs.jsonl").read_text().splitlines()]
    measured = {f"{row['prompt_id']}/{row['turn']}": row["token_ids"] for row in rows if row["method"] == "plain"}
    assert measured == {turn.id: turn.text[turn.prompt_tokens :].tolist() for turn in turns if turn.split == "test"}


@pytest.mark.parametrize("after", [3, 20])
def test_a_killed_labelling_goes_on_to_the_same_bytes(
    job: LabelJob, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """Killed when so many results are there; they are not made again."""
    outcomes = job.config.paths.outcomes
    before, written = contents(outcomes), label_work.write_shared
    made: list[Path] = []

    def killed(path: Path, data: bytes) -> None:
        if len(made) == after:
            raise KeyboardInterrupt
        made.append(path)
        written(path, data)

    def counted(path: Path, data: bytes) -> None:
        assert path not in made
        written(path, data)

    monkeypatch.setattr(label_work, "write_shared", killed)
    with pytest.raises(KeyboardInterrupt):
        label.run(job.config)
    monkeypatch.setattr(label_work, "write_shared", counted)
    label.run(job.config)
    assert len(made) == after
    assert contents(outcomes) == before


def test_another_temperature_or_seed_is_other_work(job: LabelJob, capsys: pytest.CaptureFixture[str]) -> None:
    answered(job)
    turns = len(contents(job.scratch / "answers"))

    def plan(*overrides: str) -> dict[str, Any]:
        options = [argument for override in overrides for argument in ("--set", override)]
        assert main(["label", SLUG, "--plan", *options]) == 0
        return dict(line.split(":", 1) for line in capsys.readouterr().out.splitlines())

    assert f"{turns} turns answered" in plan()["done before"]
    assert plan()["new tokens"].endswith("tiny-target, sampled at temperature 0.7")
    for override in ("label.temperature=0.8", "label.temperature=0.0", "seed=1"):
        assert "0 turns answered, 0 evaluated" in plan(override)["done before"]
    assert "sampled" not in plan("label.temperature=0.0")["new tokens"]
