import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    GemmaConfig,
    GenerationConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from tests.treegraft.tiny import save_tiny, tiny_language_model, tiny_llama, tiny_tokenizer
from treegraft.errors import UserError
from treegraft.model_folder import digest_of
from treegraft.models import (
    DTYPES,
    context_limit,
    eos_token_ids,
    load_model,
    load_stock,
    refuse_recurrent,
    resolve_device,
    resolve_drafter_dtype,
    resolve_dtype,
)
from treegraft.sources import ModelSource, resolve_model

CPU = torch.device("cpu")


def change_json(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_a_plain_folder_loads_with_the_same_logits(tmp_path: Path) -> None:
    loaded = load_model(save_tiny(tmp_path / "m", seed=3), "m", CPU, torch.float32)
    ids = torch.tensor([[2, 3, 4]])
    torch.testing.assert_close(loaded.module(ids).logits, tiny_llama(seed=3)(ids).logits)
    assert (loaded.name, loaded.vocab_size, loaded.context_limit, loaded.eos_token_ids) == ("m", 64, 512, (1,))
    assert loaded.device == CPU
    assert loaded.dtype == torch.float32
    assert loaded.module.config._attn_implementation == "sdpa"
    assert not loaded.module.training
    assert not any(parameter.requires_grad for parameter in loaded.module.parameters())


def test_the_weights_take_the_dtype_that_is_asked_for(tmp_path: Path) -> None:
    assert load_model(save_tiny(tmp_path / "m"), "m", CPU, torch.bfloat16).dtype == torch.bfloat16


def test_the_digest_tells_models_apart_and_does_not_depend_on_the_way_in(tmp_path: Path) -> None:
    plain = load_model(save_tiny(tmp_path / "a", seed=0), "a", CPU, torch.float32)
    other = load_model(save_tiny(tmp_path / "b", seed=1), "b", CPU, torch.float32)
    resolved = resolve_model("a", ModelSource(folder=tmp_path / "a"), tmp_path / "models" / "a")
    assert digest_of(plain.folder) != digest_of(other.folder)
    assert digest_of(load_model(resolved, "a", CPU, torch.float32).folder) == digest_of(plain.folder)


def test_padded_rows_and_gaps_do_not_count_as_tokens(tmp_path: Path) -> None:
    tiny_llama(vocab_size=80).save_pretrained(tmp_path)
    tiny_tokenizer(64).save_pretrained(tmp_path)
    assert load_model(tmp_path, "m", CPU, torch.float32).vocab_size == 64
    vocabulary = json.loads((tmp_path / "tokenizer.json").read_text())
    del vocabulary["model"]["vocab"][" w5"]  # 63 tokens, but the last id is still 63
    (tmp_path / "tokenizer.json").write_text(json.dumps(vocabulary))
    assert load_model(tmp_path, "m", CPU, torch.float32).vocab_size == 64


def test_a_model_with_a_window_stops_at_the_window() -> None:
    assert context_limit(LlamaConfig(max_position_embeddings=8192), "m") == 8192
    assert context_limit(MistralConfig(max_position_embeddings=32768, sliding_window=4096), "m") == 4096
    assert context_limit(MistralConfig(max_position_embeddings=32768, sliding_window=None), "m") == 32768
    windowed: dict[str, Any] = {"max_position_embeddings": 32768, "sliding_window": 1024}
    assert context_limit(Qwen2Config(**windowed, use_sliding_window=False), "m") == 32768
    assert context_limit(Qwen2Config(**windowed, use_sliding_window=True), "m") == 1024
    unused = Qwen2Config(**windowed, use_sliding_window=True, num_hidden_layers=4, max_window_layers=4)
    assert context_limit(unused, "m") == 32768  # no layer is left for the window
    assert context_limit(GPT2Config(n_positions=1024), "m") == 1024
    factors = {"rope_theta": 1e4, "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    for place in ({"original_max_position_embeddings": 4096}, {}):
        rope = {"rope_type": "longrope", **factors, **place}
        long = Phi3Config(max_position_embeddings=131072, original_max_position_embeddings=4096, rope_parameters=rope)
        assert context_limit(long, "m") == 4096  # beyond it all factors change, those of cached tokens too
    with pytest.raises(UserError, match="'m' names no context length"):
        context_limit(PreTrainedConfig(), "m")


def test_every_place_that_names_an_end_token_counts() -> None:
    tokenizer = tiny_tokenizer()  # names 1
    config = LlamaConfig(vocab_size=64, bos_token_id=0, eos_token_id=[7, 3])
    assert eos_token_ids(config, GenerationConfig(eos_token_id=5), tokenizer) == (1, 3, 5, 7)
    assert eos_token_ids(LlamaConfig(eos_token_id=None), None, tokenizer) == (1,)


def test_the_generation_config_of_a_folder_is_read(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    change_json(tmp_path / "generation_config.json", eos_token_id=[1, 9])
    assert load_model(tmp_path, "m", CPU, torch.float32).eos_token_ids == (1, 9)


RECURRENT = [
    "mamba",
    "mamba2",
    "falcon_mamba",
    "rwkv",
    "recurrent_gemma",
    "qwen3_next",
    "jamba",
    "bamba",
    "zamba",
    "zamba2",
    "falcon_h1",
    "lfm2",
    "lfm2_moe",
    "granitemoehybrid",
    "nemotron_h",
    "minimax",
    "kimi_linear",
    "olmo_hybrid",
    "xlstm",
    "zaya",
    "qwen3_5_text",
    "dory",
]


@pytest.mark.parametrize("family", RECURRENT)
def test_recurrent_and_hybrid_families_are_refused(family: str) -> None:
    with pytest.raises(UserError, match=r"model 'draft' .*cannot be rolled back"):
        refuse_recurrent(AutoConfig.for_model(family), "draft")


@pytest.mark.parametrize(
    "change",
    [
        {"layer_types": ["full_attention", "linear_attention"]},
        {"layer_types": ["full_attention", "conv"]},
        {"ssm_cfg": {"layer": "Mamba2"}},
        {"conv_L_cache": 3},
    ],
)
def test_a_family_that_nobody_listed_is_known_by_its_configuration(change: dict[str, Any]) -> None:
    config = LlamaConfig()
    for key, value in change.items():
        setattr(config, key, value)
    with pytest.raises(UserError, match="cannot be rolled back"):
        refuse_recurrent(config, "m")


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(),
        Qwen2Config(use_sliding_window=True, sliding_window=64),
        Qwen3Config(),
        GemmaConfig(),
        GPT2Config(),
    ],
    ids=lambda config: str(config.model_type),
)
def test_attention_models_are_not_refused(config: PreTrainedConfig) -> None:
    refuse_recurrent(config, "m")


@pytest.mark.parametrize(
    ("family", "says"),
    [
        ("t5", "encoder-decoder"),
        ("bart", "encoder-decoder"),
        ("llava", "multimodal"),
        ("gemma3", "multimodal"),
        ("vit", "does not know as a causal language model"),
    ],
)
def test_models_that_are_no_causal_text_models_are_refused(family: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        refuse_recurrent(AutoConfig.for_model(family), "m")


@pytest.mark.parametrize(("family", "settings"), [("bloom", {}), ("falcon", {"alibi": True}), ("gpt_neo", {})])
def test_models_that_go_by_slots_are_refused_before_their_weights_are_read(
    tmp_path: Path, family: str, settings: dict[str, Any]
) -> None:
    AutoConfig.for_model(family, **settings).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="does not go by position ids alone"):
        load_model(tmp_path, "m", CPU, torch.float32)


def test_a_missing_folder_and_a_folder_without_config_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"'m' cannot be loaded: {tmp_path}/none is not a folder"):
        load_model(tmp_path / "none", "m", CPU, torch.float32)
    with pytest.raises(UserError, match=r"has no config.json"):
        load_model(tmp_path, "m", CPU, torch.float32)


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("config.json", "{", "config.json is not valid JSON"),
        ("config.json", '{"model_type": "unheard_of"}', "'m' of type unheard_of cannot be loaded"),
        ("model.safetensors", "rubbish", "'m' cannot be loaded from"),
        ("tokenizer.json", "rubbish", "'m' cannot be loaded from"),
    ],
)
def test_damaged_files_give_one_sentence(tmp_path: Path, file: str, content: str, says: str) -> None:
    save_tiny(tmp_path)
    (tmp_path / file).write_text(content)
    with pytest.raises(UserError, match=says) as caught:
        load_model(tmp_path, "m", CPU, torch.float32)
    assert "\n" not in str(caught.value)


def test_weights_that_do_not_match_the_config_are_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, layers=2)
    change_json(tmp_path / "config.json", num_hidden_layers=3)
    with pytest.raises(UserError, match=r"lack.*model\.layers\.2"):
        load_model(tmp_path, "m", CPU, torch.float32)


def test_code_that_comes_with_a_model_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "own", "auto_map": {"AutoConfig": "code.Config"}}')
    (tmp_path / "code.py").write_text("raise SystemExit('ran')")
    with pytest.raises(UserError, match="'m' of type own cannot be loaded"):
        load_model(tmp_path, "m", CPU, torch.float32)


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_device("cpu") == CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert resolve_device("auto") == CPU
    with pytest.raises(UserError, match="'cuda' is not on this machine"):
        resolve_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("auto") == torch.device("cuda")
    assert resolve_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(UserError, match="'cuda:2' is not on this machine, where torch sees 2"):
        resolve_device("cuda:2")
    for wrong in ("gpu", "mps", "", "cuda:x"):
        with pytest.raises(UserError, match="is none of auto, cpu, cuda"):
            resolve_device(wrong)


def test_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, dtype in DTYPES.items():
        assert resolve_dtype(name, CPU) == dtype
    assert resolve_dtype("auto", torch.device("cuda")) == torch.bfloat16
    for supported, expected in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda answer=supported: answer)
        assert resolve_dtype("auto", CPU) == expected
    with pytest.raises(UserError, match="dtype 'fp16' is none of auto, float32"):
        resolve_dtype("fp16", CPU)


def test_dtypes_of_drafters(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    for name, dtype in DTYPES.items():
        assert resolve_drafter_dtype(name, CPU, torch.bfloat16) == dtype
    for available in (True, False):
        monkeypatch.setattr("treegraft.models.can_quantize", lambda answer=available: answer)
        assert resolve_drafter_dtype("auto", cuda, torch.float16) == torch.float16
        assert resolve_drafter_dtype("auto", CPU, torch.bfloat16) == (torch.int8 if available else torch.bfloat16)
        with pytest.raises(UserError, match="int8 is for CPUs with PyTorch's FBGEMM, not for cuda"):
            resolve_drafter_dtype("int8", cuda, torch.float16)
    with pytest.raises(UserError, match="int8 is for CPUs"):
        resolve_drafter_dtype("int8", CPU, torch.float32)


def test_stock_is_a_second_model_only_where_the_first_was_changed(tmp_path: Path) -> None:
    loaded = load_model(save_tiny(tmp_path / "m"), "m", CPU, torch.float32)
    assert load_stock(loaded) is not loaded.module
    module: Any = tiny_llama()
    elsewhere = replace(loaded, module=module.to("meta"))
    assert load_stock(elsewhere) is elsewhere.module


def test_the_tiny_model_keeps_its_promises() -> None:
    before = torch.random.get_rng_state()
    model = tiny_language_model(seed=5)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert {field.name for field in fields(model)} == set(vars(model))
    ids = torch.arange(2, 34)[None]
    logits = model.module(ids).logits
    assert torch.equal(logits, tiny_llama(seed=5)(ids).logits)
    top = logits.softmax(-1).max(-1).values
    assert 0.2 < top.mean() < 0.8  # neither flat (1/64) nor certain
    text = model.tokenizer.decode([2, 3, 63])
    assert text == " w2 w3 w63"
    assert model.tokenizer(text).input_ids == [2, 3, 63]
    assert model.tokenizer(text.strip()).input_ids == [2, 3, 63]
    chat = model.tokenizer.apply_chat_template([{"role": "user", "content": "w4 w5"}], return_dict=False)
    assert chat == [0, 4, 5]
