import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from pipeline import draft, fetch
from pipeline.params import PairConfig
from pipeline.params_file import resolve_pair
from tests.treegraft.tiny import save_tiny, tiny_llama
from treegraft.errors import UserError

SHIPPED: dict[str, Any] = yaml.safe_load((Path(__file__).parents[2] / "params.yaml").read_text())
NGRAM = {"name": "ngram", "kind": "ngram"}


@pytest.fixture(autouse=True)
def _in_an_empty_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TREEGRAFT_MODELS", raising=False)


def pair(target: Path, *drafters: dict[str, str]) -> PairConfig:
    entry = {"target": {"name": "big", "folder": str(target)}, "drafters": [NGRAM, *drafters]}
    return resolve_pair(SHIPPED | {"pairs": {"tiny": entry}}, "tiny")


def manifest(stage: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(Path(f"models/manifests/tiny/{stage}.json").read_text())
    return content


def with_drafter(tmp_path: Path, vocab_size: int = 64) -> PairConfig:
    target = save_tiny(tmp_path / "a", layers=2)
    small = save_tiny(tmp_path / "b", layers=1, vocab_size=vocab_size)
    return pair(target, {"name": "small", "kind": "lm", "folder": str(small)})


def with_layers(tmp_path: Path) -> PairConfig:
    from pipeline.pruned_student import make_student, save_layers

    target = save_tiny(tmp_path / "a", layers=3)
    save_layers(make_student(tiny_llama(layers=3), [0, 2]), torch.arange(40), Path("layers.safetensors"))
    return pair(target, {"name": "small", "kind": "lm", "distilled": "layers.safetensors"})


def test_fetch_describes_every_model_and_changes_nothing_when_repeated(tmp_path: Path) -> None:
    config = with_drafter(tmp_path)
    fetch.run(config)
    first = config.paths.manifest("fetch").read_bytes()
    models = manifest("fetch")["models"]
    assert set(models) == {"big", "small"}
    assert models["small"]["shared_vocabulary"] == 64
    assert models["small"]["tokenizer_hash"] == models["big"]["tokenizer_hash"]
    assert models["small"]["digest"] != models["big"]["digest"]
    fetch.run(config)
    assert config.paths.manifest("fetch").read_bytes() == first


def test_fetch_refuses_another_vocabulary_and_leaves_no_manifest(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="do not share a vocabulary"):
        fetch.run(with_drafter(tmp_path, vocab_size=48))
    assert not Path("models/manifests").exists()


def test_fetch_refuses_a_recurrent_model(tmp_path: Path) -> None:
    config = with_drafter(tmp_path)
    path = tmp_path / "b" / "config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"model_type": "mamba", "architectures": ["MambaForCausalLM"]})
    )
    with pytest.raises(UserError, match="recurrent"):
        fetch.run(config)


def test_fetch_refuses_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere"):
        fetch.run(pair(tmp_path / "nowhere", {"name": "small", "kind": "lm", "folder": "there"}))


def test_draft_has_nothing_to_build_for_a_pair_of_models(tmp_path: Path) -> None:
    draft.run(with_drafter(tmp_path))
    assert manifest("draft") == {"schema": 1, "pair": "tiny", "models": {}}


def test_draft_assembles_a_loadable_model_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from pipeline import pruned_student
    from treegraft.model_folder import digest_of
    from treegraft.models import load_model

    config = with_layers(tmp_path)
    fetch.run(config)
    draft.run(config)
    model = load_model(config.paths.drafter("small"), "small", torch.device("cpu"), torch.float32)
    assert model.module.config.num_hidden_layers == 2
    assert digest_of(model.folder) == manifest("draft")["models"]["small"]["digest"]
    monkeypatch.setattr(pruned_student, "assemble_drafter", lambda *arguments: pytest.fail("assembled again"))
    draft.run(config)


@pytest.mark.parametrize("damage", ["weights", "folder", "layers"])
def test_draft_assembles_again_what_has_changed(tmp_path: Path, damage: str) -> None:
    from pipeline.pruned_student import make_student, save_layers

    config = with_layers(tmp_path)
    fetch.run(config)
    draft.run(config)
    before = manifest("draft")["models"]["small"]
    weights = config.paths.drafter("small") / "model.safetensors"
    if damage == "weights":
        weights.write_bytes(b"x" + weights.read_bytes()[1:])
    elif damage == "folder":
        weights.parent.rename(tmp_path / "gone")
    else:
        save_layers(make_student(tiny_llama(layers=3), [0, 1]), torch.arange(40), Path("layers.safetensors"))
    draft.run(config)
    assert (manifest("draft")["models"]["small"] == before) == (damage != "layers")
    assert weights.read_bytes()[:1] != b"x"


def test_draft_says_what_is_missing(tmp_path: Path) -> None:
    config = with_layers(tmp_path)
    with pytest.raises(UserError, match="run `pipeline fetch tiny` first"):
        draft.run(config)
    fetch.run(config)
    Path("layers.safetensors").unlink()
    with pytest.raises(UserError, match="pipeline draft --rebuild tiny"):
        draft.run(config)
    with pytest.raises(UserError, match="0 distilled drafters"):
        draft.rebuild(with_drafter(tmp_path))


def test_rebuild_trains_on_prompts_that_no_scheduler_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pipeline import distill_drafter
    from pipeline.prompts import load_prompts, split_prompts

    def write(folder: str, numbers: range) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        rows = [json.dumps({"question_id": index, "turns": [f"text {index}"]}) for index in numbers]
        Path(folder, "chat.jsonl").write_text("\n".join(rows))

    seen: dict[str, Any] = {}

    def train(**arguments: Any) -> dict[str, float]:
        seen.update(arguments)
        return {"all": 0.5}

    monkeypatch.setattr(distill_drafter, "train_drafter", train)
    config = with_layers(tmp_path)
    fetch.run(config)
    write("data/prompts", range(20))
    write("prompts", range(19, 30))
    with pytest.raises(UserError, match="the prompt chat/19 that the drafter is taught is also chat/19"):
        draft.rebuild(config)
    assert not seen
    write("prompts", range(20, 30))
    draft.rebuild(config)
    splits = split_prompts(load_prompts(["data/prompts"]))
    assert seen["prompts"] == [f"text {index}" for index in range(20, 30)]
    assert {text for _, text in seen["held_out"]} <= {prompt.turns[0] for prompt in splits["test"]}
    assert seen["out"] == Path("layers.safetensors")
    assert (seen["target_folder"] / "config.json").is_file()
