"""dvc.yaml against the stages, the files and the code that it speaks of."""

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.params_file import load_pair, read_params
from pipeline.stages import SECTIONS, STAGES

ROOT = Path(__file__).parents[2]
PAIR = "smollm2-135m"
DVC: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
PER_PAIR = {name: stage for name, stage in DVC.items() if "matrix" in stage}

# How results are moved, named and shown and who makes them, not what they are: a change here must not cost a run.
PLUMBING = {
    "pipeline/claims.py",
    "pipeline/executors.py",
    "pipeline/files.py",
    "pipeline/params.py",
    "pipeline/params_file.py",
    "pipeline/paths.py",
    "pipeline/progress.py",
    "pipeline/provenance.py",
    "pipeline/stages.py",
    "treegraft/errors.py",
}


def paths(entries: list[Any], pair: str = PAIR) -> set[str]:
    """The paths of a list of deps, outs, metrics or plots, for one pair."""
    names = [next(iter(entry)) if isinstance(entry, dict) else entry for entry in entries]
    return {str(name).replace("${item.pair}", pair) for name in names}


def outs(stage: dict[str, Any]) -> set[str]:
    return paths([*stage.get("outs", []), *stage.get("metrics", []), *stage.get("plots", [])])


def covered(path: str, by: set[str]) -> bool:
    return any(path == entry or path.startswith(entry + "/") for entry in by)


def test_stages_are_those_of_the_command_line_in_order() -> None:
    assert list(PER_PAIR) == list(STAGES)
    for name, stage in PER_PAIR.items():
        assert stage["matrix"] == {"pair": "${run}"}
        assert stage["cmd"] == f"pipeline {name} ${{item.pair}}"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # dvc's own, about its trie
def test_dvc_itself_resolves_the_matrix_for_slugs_with_dots(tmp_path: Path) -> None:
    from dvc.repo import Repo
    from dvc.stage import PipelineStage

    params = read_params(ROOT / "params.yaml") | {"run": [PAIR, "qwen2.5-coder-1.5b"]}
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(params))
    (tmp_path / "dvc.yaml").write_text((ROOT / "dvc.yaml").read_text())
    Repo.init(str(tmp_path), no_scm=True).close()
    with Repo(str(tmp_path)) as repo:
        names = {stage.name for stage in repo.index.stages if isinstance(stage, PipelineStage)}
        assert repo.index.graph.number_of_edges() > len(names), "the stages hang together"
    assert names == {"train_drafter"} | {f"{stage}@{pair}" for stage in STAGES for pair in params["run"]}


def test_the_frozen_drafter_is_the_one_that_the_default_pair_uses() -> None:
    frozen = [stage for stage in DVC.values() if "matrix" not in stage]
    assert [stage["frozen"] for stage in frozen] == [True]
    assert frozen[0]["cmd"] == f"pipeline draft --rebuild {PAIR}"
    config = load_pair(PAIR, (), ROOT / "params.yaml")
    assert outs(frozen[0]) == {str(drafter.distilled) for drafter in config.drafters if drafter.distilled}


@pytest.mark.parametrize("name", PER_PAIR)
def test_deps_outs_and_sections_are_those_the_stage_declares(name: str) -> None:
    stage, config = STAGES[name], load_pair(PAIR, (), ROOT / "params.yaml")
    filled = (path.replace("<pair>", PAIR).rstrip("/") for path in stage.writes)
    # Models are no outs, and neither is what the cells of a matrix share.
    declared = {path for path in filled if "<" not in path} - {"reports/index.html"}
    written = outs(PER_PAIR[name])
    assert all(covered(path, declared) for path in written)
    assert all(any(covered(path, {entry}) for path in written) for entry in declared)
    sections = {str(config.paths.config(section)) for section in stage.sections}
    deps = paths(PER_PAIR[name]["deps"])
    if name == "fetch":
        assert "params.yaml" in deps, "fetch makes the sections out of the file"
    else:
        assert {dep for dep in deps if "/config/" in dep} == sections


@pytest.mark.parametrize("name", PER_PAIR)
def test_what_a_stage_reads_is_a_dep(name: str) -> None:
    deps = paths(PER_PAIR[name]["deps"])
    for read in STAGES[name].reads:
        path = read.replace("<pair>", PAIR).rstrip("/")
        if path.startswith(("models/targets", "models/drafters")):
            stage = "fetch" if name == "draft" else "draft"
            assert f"models/manifests/{PAIR}/{stage}.json" in deps, "manifests stand for models"
        elif path != "the models' sources":
            assert path in deps


def test_every_output_survives_until_its_stage_replaces_it() -> None:
    for stage in DVC.values():
        for entry in [*stage.get("outs", []), *stage.get("metrics", []), *stage.get("plots", [])]:
            assert next(iter(entry.values()))["persist"] is True


def test_git_ignores_every_output_already_so_that_dvc_edits_no_gitignore() -> None:
    def is_ignored(path: str) -> bool:
        code = subprocess.run(["git", "check-ignore", "-q", "--no-index", path], cwd=ROOT, check=False).returncode
        if code not in (0, 1):
            pytest.skip("git cannot tell: not a repository")
        return code == 0

    generated = {path for stage in PER_PAIR.values() for path in outs(stage)}
    generated |= {"models/targets/x/y", "models/drafters/x/y", ".treegraft/x/label/y", ".venv/x"}
    assert [path for path in sorted(generated) if not is_ignored(path)] == []
    kept = ["data/drafters/smollm2-135m-draft.safetensors", "data/prompts/chat.jsonl", "dvc.lock", "params.yaml"]
    assert [path for path in kept if is_ignored(path)] == []


@pytest.mark.parametrize("name", PER_PAIR)
def test_the_code_a_stage_imports_is_a_dep(name: str) -> None:
    deps = paths(PER_PAIR[name]["deps"])
    code = {str(path.relative_to(ROOT)) for path in imported(ROOT / "pipeline" / f"{name}.py")}
    missing = sorted(path for path in code - PLUMBING if not covered(path, deps))
    assert not missing, f"a change of these would not rerun {name}"


@pytest.mark.parametrize("name", [name for name in PER_PAIR if name != "fetch"])
def test_a_stage_reads_no_parameter_that_would_not_rerun_it(name: str) -> None:
    heeded = {field for section in STAGES[name].sections for field in SECTIONS[section]}
    every = {field for fields in SECTIONS.values() for field in fields}
    other_stages = {f"pipeline/{other}.py" for other in STAGES if other != name}
    code = imported(ROOT / "pipeline" / f"{name}.py", not_through=PLUMBING | other_stages)
    used = {
        node.attr
        for path in code
        if path.parent.name == "pipeline" and str(path.relative_to(ROOT)) not in PLUMBING | other_stages
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "config"
    }
    if name == "draft":
        used -= {"prompts"}  # only --rebuild reads them, which dvc does not run
    assert used & every <= heeded


@pytest.mark.parametrize("name", DVC)
def test_code_deps_exist(name: str) -> None:
    for dep in paths(DVC[name].get("deps", [])):
        if dep.startswith(("pipeline", "treegraft")):
            assert (ROOT / dep).exists()


def imported(start: Path, not_through: set[str] = PLUMBING) -> set[Path]:
    """``start`` and every module of this project that it imports, directly or not, at the top or inside functions.

    What the modules ``not_through`` import is left out; what params.py takes from the library is checks.
    """
    found: set[Path] = set()
    waiting = [start]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            if str(path.relative_to(ROOT)) not in not_through:
                waiting.extend(neighbours(path))
    return found


def neighbours(path: Path) -> Iterator[Path]:
    for node in ast.walk(runtime_only(ast.parse(path.read_text(encoding="utf-8")))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            base = ROOT.joinpath(*name.split("."))
            for candidate in (base.with_suffix(".py"), base / "__init__.py"):
                # An empty package file holds no code.
                if name.split(".")[0] in ("pipeline", "treegraft") and candidate.is_file() and holds_code(candidate):
                    yield candidate


def holds_code(path: Path) -> bool:
    return any(not isinstance(node, ast.Expr) for node in ast.parse(path.read_text(encoding="utf-8")).body)


def runtime_only(tree: ast.Module) -> ast.Module:
    """``tree`` without what stands under ``if TYPE_CHECKING``, which no run executes."""

    class Strip(ast.NodeTransformer):
        def visit_If(self, node: ast.If) -> ast.AST | None:
            if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
                return None
            return self.generic_visit(node)

    return Strip().visit(tree)
