"""Faults that were reported against other pipelines, each made impossible; numbers are those of the list they are from.

What other files hold already is not repeated here: static .gitignore lines (test_dvc), kills of whole processes
(test_end_to_end), damaged and incomplete traces (test_validation), memory of big traces (test_trace_memory).
"""

import ast
import importlib.util
import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml

from pipeline import cli, distill, provenance, students
from pipeline.evaluate import measure
from pipeline.params import PairConfig
from pipeline.params_file import load_pair
from pipeline.prompts import Prompt
from pipeline.student import Student
from tests.pipeline.test_distill import config as distill_config  # noqa: F401  a fixture
from tests.pipeline.test_distill import outputs, tables, write_traces
from tests.pipeline.test_dvc import DVC, ROOT, paths
from tests.treegraft.values.toy import labelled_tables, write_folder
from treegraft.values import traces
from treegraft.values.traces import trace_manifest
from treegraft.values.validation import read_validated

# 18: a later stage fails and earlier outputs lose their .gitignore lines (dvc 11091)


def gitignores(root: Path) -> dict[str, str]:
    """Every .gitignore of the project by its path; dvc's own folder has one that is dvc's."""
    files = (path.relative_to(root) for path in root.rglob(".gitignore"))
    return {str(path): (root / path).read_text() for path in files if path.parts[0] != ".dvc"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # dvc's own, about its trie
@pytest.mark.parametrize("failing", ["label", "report"])
def test_a_failing_stage_touches_no_gitignore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    """dvc runs this project's own dvc.yaml, with stages that write their outputs at once; one fails for one pair."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DVC_NO_ANALYTICS", "1")
    subprocess.run(["git", "init", "-q"], check=True)
    for name in (".gitignore", ".dvcignore"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "params.yaml").write_text("run: [one, two-1.0]\n")
    (tmp_path / "write.py").write_text(
        "import sys\n"
        "from pathlib import Path\n"
        "for path in map(Path, sys.argv[2:]):\n"
        "    path.parent.mkdir(parents=True, exist_ok=True)\n"
        "    path.write_text(str(path))\n"
        "sys.exit(sys.argv[1] == 'two-1.0')\n"
    )
    stages = {name: dict(stage) for name, stage in DVC.items() if "matrix" in stage}
    written = {path for stage in stages.values() for path in outs_of(stage)}
    for name, stage in stages.items():
        pair = "${item.pair}" if name == failing else "none"
        stage["cmd"] = " ".join([sys.executable, "write.py", pair, *sorted(outs_of(stage))])
        stage["deps"] = [dep for dep in stage["deps"] if dep in written]
    (tmp_path / "dvc.yaml").write_text(yaml.safe_dump({"stages": stages}))
    before = gitignores(tmp_path)
    dvc = [sys.executable, "-m", "dvc"]
    subprocess.run([*dvc, "init", "-q"], check=True, capture_output=True)
    done = subprocess.run([*dvc, "repro", "--keep-going"], check=False, capture_output=True, text=True)
    assert done.returncode != 0, done.stdout
    assert f"{failing}@two-1.0" in done.stderr
    assert Path("models/manifests/two-1.0/fetch.json").exists()
    assert Path("data/outcomes/one").exists()
    assert gitignores(tmp_path) == before
    status = subprocess.run(["git", "status", "--porcelain", "-uall"], check=True, capture_output=True, text=True)
    seen = {line[3:] for line in status.stdout.splitlines() if not line[3:].startswith(".dvc/")}
    assert seen == {".gitignore", ".dvcignore", "params.yaml", "write.py", "dvc.yaml", "dvc.lock"}


def outs_of(stage: dict[str, Any]) -> set[str]:
    return {path for key in ("outs", "metrics", "plots") for path in paths(stage.get(key, []), "${item.pair}")}


# 19: code edited while a stage runs counts as if it had run (dvc 11058)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of this project's kind in a folder of its own: ``used`` is imported, ``unused`` is not."""
    folder = tmp_path / "pipeline"
    (folder / "templates").mkdir(parents=True)
    for name in ("used.py", "unused.py", "templates/page.j2"):
        (folder / name).write_text("x = 1\n")
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    load(folder / "used.py", monkeypatch)
    return folder


def load(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Import a file as a module."""
    specification = importlib.util.spec_from_file_location(f"edited_{path.stem}", path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    monkeypatch.setitem(sys.modules, specification.name, module)
    specification.loader.exec_module(module)


def test_only_own_code_that_changed_is_named(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = provenance.source_digests()
    assert set(before) == {"pipeline/used.py", "pipeline/unused.py", "pipeline/templates/page.j2"}
    assert provenance.changed_code(before) == []
    (package / "__pycache__").mkdir()
    (package / "__pycache__/used.pyc").write_text("")
    (package / "unused.py").write_text("x = 2\n")
    assert provenance.changed_code(before) == [], "it was never read"
    load(package / "unused.py", monkeypatch)
    assert provenance.changed_code(before) == ["pipeline/unused.py"], "edited first, imported later"
    (package / "used.py").write_text("x = 2\n")
    (package / "templates/page.j2").unlink()
    assert set(provenance.changed_code(before)) == {
        *("pipeline/unused.py", "pipeline/used.py", "pipeline/templates/page.j2")
    }


def test_a_stage_whose_code_changes_says_so(
    package: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(ROOT / "params.yaml", package.parent)
    monkeypatch.chdir(package.parent)
    edits: list[str] = ["x = 2\n", "x = 2\n"]

    def stage(config: PairConfig) -> None:
        (package / "used.py").write_text(edits.pop())

    monkeypatch.setitem(sys.modules, "pipeline.label", SimpleNamespace(run=stage))
    assert cli.main(["label", "smollm2-135m"]) == 0
    message = capsys.readouterr().err
    assert "The code changed while stage label ran (pipeline/used.py)" in message
    assert "dvc repro -f -s label@smollm2-135m" in message
    assert cli.main(["label", "smollm2-135m"]) == 0, "an edit to the same text changes nothing"
    assert capsys.readouterr().err == ""


def test_provenance_names_the_code(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = provenance.source_digests()
    (package / "used.py").write_text("x = 2\n")
    found = provenance.code_provenance(before)
    assert found["code_changed"] == ["pipeline/used.py"]
    assert found["code_digest"] == provenance.digest(before)
    monkeypatch.setattr(provenance, "__file__", str(package / "used.py"))
    outside = provenance.code_provenance(before)
    assert outside["git_revision"] is None, "a folder that no git checkout holds"
    assert outside["dirty"] is None

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=n", "-c", "user.email=e@x"]
        command = ["git", *identity, "-C", str(package.parent), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    assert provenance.code_provenance(before)["git_revision"] is None, "installed into somebody's checkout, untracked"
    git("add", ".")
    git("commit", "-q", "-m", "m")
    clean = provenance.code_provenance(before)
    assert (clean["git_revision"], clean["dirty"]) == (git("rev-parse", "HEAD"), False)
    (package.parent / "dvc.lock").write_text("a")
    git("add", ".")
    assert provenance.code_provenance(before)["dirty"] is False, "dvc writes its lock while it runs"
    (package / "unused.py").write_text("x = 3\n")
    assert provenance.code_provenance(before)["dirty"] is True
    monkeypatch.setenv("PATH", str(package))
    assert provenance.code_provenance(before)["git_revision"] is None, "no git at all"


# 19: a checkpoint with dataclass hyper-parameters does not reload (Lightning 21757)


def test_hyper_parameters_are_plain(tmp_path: Path) -> None:
    """As the stage gives them: out of the typed parameters."""
    settings = load_pair("smollm2-135m", (), ROOT / "params.yaml").distill
    student = Student(5, 1, settings.hidden, settings.learning_rate, settings.weight_decay, settings.epochs)
    torch.save(dict(student.hparams), tmp_path / "plain.pt")
    again = torch.load(tmp_path / "plain.pt", weights_only=True)  # refuses every class that is not plain
    assert json.loads(json.dumps(again)) == again


# 20: a killed worker, then resume: as much is done as was asked for (optuna 6283, 1865)


@pytest.mark.parametrize("seed", range(4))
def test_evaluate_killed_again_and_again_measures_every_cell_once(tmp_path: Path, seed: int) -> None:
    random = np.random.default_rng(seed)
    target = SimpleNamespace(tokenizer=None)
    bench: Any = SimpleNamespace(
        config=SimpleNamespace(evaluate=SimpleNamespace(repeats=2), seed=0), models=SimpleNamespace(target=target)
    )
    encoded = pytest.MonkeyPatch()
    encoded.setattr(
        "treegraft.pair.encode_turns", lambda target, turns, answers: np.array([int(turns[0]), len(answers)])
    )
    calls = 0

    def method(name: str) -> Callable[..., dict[str, Any]]:
        def run(tokens: Any, sampling: Any) -> dict[str, Any]:
            nonlocal calls
            calls += 1
            if random.random() < 0.05:
                raise KeyboardInterrupt
            return {"tokens": 1, "token_ids": [sampling.seed], "text": name}

        return run

    prompts = [Prompt(f"k/{number}", "k", (str(number),) * (1 + number % 2)) for number in range(6)]
    names, turns, rows = ("plain", "ngram", "treegraft"), tmp_path / "turns.jsonl", None
    kills = 0
    while rows is None:
        try:
            rows = measure(bench, {name: method(name) for name in names}, prompts, 1.0, turns)
        except KeyboardInterrupt:
            kills += 1
            if kills % 2:  # the kill fell into the write of a line
                with turns.open("ab") as file:
                    file.write(b'{"prompt_id": "k/0", "tur')
    encoded.undo()
    assert kills > 0
    cells = Counter((row["prompt_id"], row["turn"], row["method"], row["repeat"]) for row in rows)
    asked = {
        (p.id, turn, name, repeat)
        for p in prompts
        for turn in range(len(p.turns))
        for name in names
        for repeat in range(2)
    }
    assert set(cells) == asked
    assert set(cells.values()) == {1}
    # All methods of a repeat draw the same numbers, no two repeats or turns do.
    seeds = {(row["prompt_id"], row["turn"], row["repeat"], row["seed"]) for row in rows}
    assert len(seeds) == len({seed for *_, seed in seeds}) == len(asked) / len(names)
    assert all(row["divergence"] is None for row in rows)


def test_distill_killed_after_every_fit_does_each_once(
    distill_config: PairConfig,  # noqa: F811  the fixture
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pipeline.baselines.BASELINES", ("linear",))
    real, done, kills = students.store, [], 0

    def stored_then_killed(path: Path, student: Any) -> None:
        real(path, student)
        done.append(path.name)
        raise KeyboardInterrupt

    monkeypatch.setattr(students, "store", stored_then_killed)
    while True:
        try:
            distill.run(distill_config)
            break
        except KeyboardInterrupt:
            kills += 1
    seeds, rounds = distill_config.distill.seeds, distill_config.distill.policy_iterations + 1
    assert sorted(done) == sorted(f"seed-{s}-round-{r}.safetensors" for s in seeds for r in range(rounds))
    assert kills == len(done)
    fits = json.loads(distill_config.paths.distill_metrics.read_text())["fits"]
    assert len(fits) == len(done)


# 21: equal weights, different bytes (safetensors 584)


def test_every_safetensors_file_has_one_metadata_key_at_most() -> None:
    """More are written in random order. Found by reading the code, so that a new writer is held to it as well."""
    writers = []
    for package in ("pipeline", "treegraft"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and called(node).split(".")[-1] in ("save", "save_file"):
                    if "torch.save" in called(node):
                        continue
                    writers.append(path.name)
                    metadata = next((word.value for word in node.keywords if word.arg == "metadata"), None)
                    assert metadata is None or (isinstance(metadata, ast.Dict) and len(metadata.keys) <= 1), path
    assert {"checkpoint.py", "students.py", "pruned_student.py", "self_instruct.py"} <= set(writers)


def called(node: ast.Call) -> str:
    return ast.unparse(node.func)


# 21: training twice into one folder exports a stale checkpoint (Lightning 5000)


def test_training_again_in_the_same_folder_is_training_in_a_fresh_one(
    distill_config: PairConfig,  # noqa: F811  the fixture
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pipeline.baselines.BASELINES", ("linear",))
    distill.run(distill_config)
    first = outputs(distill_config)
    again = distill_config.model_copy(update={"seed": distill_config.seed + 1})
    distill.run(again)
    second = outputs(again)
    assert second["model.safetensors"] != first["model.safetensors"]
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    monkeypatch.chdir(fresh)
    write_traces(again, tables())
    distill.run(again)
    assert outputs(again) == second


# 22: reading a file of many row groups takes memory near its size (arrow 39808)

COUNTING = pa.proxy_memory_pool(pa.default_memory_pool())  # arrow may hold on to it, so it is never freed


def test_reading_many_row_groups_holds_a_few_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "ROW_GROUP", 256)
    monkeypatch.setattr("treegraft.values.validation.ROW_GROUP", 256)
    write_folder(
        tmp_path, {split: labelled_tables(0, prompts=300, kind=split) for split in ("train", "validation", "test")}
    )
    files = sorted(tmp_path.rglob("*.parquet"))
    groups = [pq.ParquetFile(path).num_row_groups for path in files]
    assert min(groups) > 30
    whole = max(pq.read_table(path).nbytes for path in files)
    pool = pa.default_memory_pool()
    pa.set_memory_pool(COUNTING)
    try:
        read = read_validated(tmp_path)
    finally:
        pa.set_memory_pool(pool)
    assert len(read["train"]) == 300 * 12
    assert 0 < COUNTING.max_memory() < whole / 2


# 23: a missing column is silently null, an empty shard fails, a hive `split=` folder merges splits (datasets)


def drop_column(table: pa.Table) -> pa.Table:
    return table.drop_columns(["f_log_prompt_tokens"])


def no_rows(table: pa.Table) -> pa.Table:
    return table.slice(0, 0)


@pytest.mark.parametrize(
    ("change", "says"), [(drop_column, "lacks the column f_log_prompt_tokens"), (no_rows, "has 0 prompts")]
)
@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_a_missing_column_and_an_empty_shard_are_refused_before_training(
    distill_config: PairConfig,  # noqa: F811  the fixture
    capsys: pytest.CaptureFixture[str],
    change: Callable[[pa.Table], pa.Table],
    says: str,
    split: str,
) -> None:
    """Even where the manifest vouches for the bytes."""
    folder = distill_config.paths.traces
    for table in ("states",) if change is drop_column else ("states", "schedules"):
        path = folder / table / f"{split}-00000-of-00001.parquet"
        pq.write_table(change(pq.read_table(path)), path)
    manifest = json.loads((folder / "manifest.json").read_text())
    drafters = [drafter.name for drafter in distill_config.drafters]
    (folder / "manifest.json").write_text(
        json.dumps(manifest | {"files": trace_manifest(folder, tables(), drafters, 0.0, 30)["files"]})
    )
    with pytest.raises(ValueError, match=says):
        distill.run(distill_config)
    assert not distill_config.paths.scheduler.exists()


def test_datasets_keeps_splits_apart_without_being_told(tmp_path: Path) -> None:
    import datasets

    sizes = {"train": 5, "validation": 3, "test": 2}
    write_folder(tmp_path / "traces", {split: labelled_tables(0, prompts=n, kind=split) for split, n in sizes.items()})
    assert not [path for path in tmp_path.rglob("*") if "=" in path.name], "a hive folder would merge them"
    for table, rows in (("states", 3), ("schedules", 4)):
        loaded = datasets.load_dataset(str(tmp_path / "traces" / table), cache_dir=str(tmp_path / "cache"))
        assert {split: len(part) for split, part in loaded.items()} == {s: n * 12 * rows for s, n in sizes.items()}
        for split, part in loaded.items():
            assert set(part["kind"]) == {split}
            assert not any(None in part[column] for column in part.column_names)
