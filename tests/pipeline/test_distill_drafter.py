"""Distillation on a random Llama of 20,000 parameters: round trip, learning, resume, refusals."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from pipeline import distill_drafter
from pipeline.distill_drafter import DrafterRecipe, assemble_drafter, train_drafter
from pipeline.pruned_student import is_stored, make_student, save_layers
from pipeline.self_instruct import BatchDecoder, TeacherRecipe, chat_tokens, write_shard
from tests.treegraft.tiny import save_tiny
from treegraft.errors import UserError
from treegraft.models import load_model
from treegraft.vocabulary import check_vocabularies

TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }} {{ m['content'] }}<e>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant {% endif %}"
)
PROMPTS = ["What is a tree", "Add two and three", "Name a river"]
TINY = DrafterRecipe(
    layers=(0, 1, 3),
    matched=(1, 2),
    teacher=TeacherRecipe(row_tokens=96, batch_rows=4, answer_tokens=24, user_tokens=12, hidden_after=(2, 4)),
    self_shards=2,
    given_row_tokens=160,
    fit_rows=4,
    match_steps=8,
    learning_rate=3e-3,
    warmup_steps=2,
    total_steps=20,
    vocabulary=200,
    checkpoint_steps=5,
)


def silent(stage: str, done: int, total: int) -> None:
    """A progress report for nobody."""


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random 4-layer Llama over bytes with a chat template, saved in bf16 as a target folder."""
    folder = tmp_path_factory.mktemp("target")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(["<s>", "<e>", *alphabet])}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="<e>", pad_token="<e>")
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def load(folder: Path) -> LlamaForCausalLM:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def test_student_with_all_layers_survives_the_round_trip(target_folder: Path, tmp_path: Path) -> None:
    """Each stored weight is within half a step of its row's scale, and the folder is the target but for that."""
    target = load(target_folder)
    save_layers(make_student(target, range(4)), torch.arange(7, 150), tmp_path / "layers.safetensors")
    assemble_drafter(target_folder, tmp_path / "layers.safetensors", tmp_path / "drafter")
    drafter = load(tmp_path / "drafter")
    for (name, ours), theirs in zip(drafter.named_parameters(), target.parameters(), strict=True):
        step = theirs.abs().amax(-1, keepdim=True) / 127 if is_stored(name) and theirs.ndim == 2 else 0
        assert ((ours - theirs).abs() <= step / 2 + theirs.abs() / 256).all(), name
    model = load_model(tmp_path / "drafter", "drafter", torch.device("cpu"), torch.float32)
    tokens = torch.randint(2, 200, (2, 17), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        torch.testing.assert_close(model.module(tokens).logits, drafter(tokens).logits[..., 7:150])
    assert check_vocabularies(load_model(target_folder, "t", torch.device("cpu"), torch.float32), model).size == 143
    assert AutoTokenizer.from_pretrained(tmp_path / "drafter").chat_template == TEMPLATE


def test_assembled_folder_has_the_pruned_depth(target_folder: Path, tmp_path: Path) -> None:
    save_layers(make_student(load(target_folder), (0, 3)), torch.arange(9), tmp_path / "layers.safetensors")
    assemble_drafter(target_folder, tmp_path / "layers.safetensors", tmp_path / "drafter")
    assert json.loads((tmp_path / "drafter" / "config.json").read_text())["num_hidden_layers"] == 2
    assert load(tmp_path / "drafter").config.num_hidden_layers == 2
    assert not (tmp_path / "drafter.tmp").exists()


@pytest.mark.parametrize("fault", ["shape", "missing", "extra"])
def test_layers_of_another_shape_are_refused(target_folder: Path, tmp_path: Path, fault: str) -> None:
    path = tmp_path / "layers.safetensors"
    save_layers(make_student(load(target_folder), (0, 3)), torch.arange(9), path)
    layers = load_file(str(path))
    name = "model.layers.1.mlp.up_proj.weight"
    if fault == "shape":
        layers[name] = torch.zeros(32, 25, dtype=torch.int8)
    elif fault == "missing":
        del layers[name], layers[f"{name}.scale"]
    else:
        name = "lm_head.weight"
        layers[name] = torch.zeros(2, 2, dtype=torch.bfloat16)
    save_file(layers, str(path))
    with pytest.raises(UserError, match=name):
        assemble_drafter(target_folder, path, tmp_path / "drafter")
    assert not (tmp_path / "drafter").exists()


def test_lockstep_decoder_equals_the_model(target_folder: Path) -> None:
    model = load(target_folder)
    tokens = torch.randint(2, 200, (3, 9), generator=torch.Generator().manual_seed(2))
    decoder = BatchDecoder(model, 3, 9)
    with torch.inference_mode():
        expected = model(tokens, output_hidden_states=True).hidden_states
        for position in range(9):
            kept, final = decoder.step(tokens[:, position], position, (2, 3))
            torch.testing.assert_close(kept[0], expected[2][:, position])
            torch.testing.assert_close(kept[1], expected[3][:, position])
            torch.testing.assert_close(final, expected[4][:, position])


def test_answers_in_a_shard_are_the_targets_greedy_tokens(target_folder: Path, tmp_path: Path) -> None:
    model, tokenizer = load(target_folder), AutoTokenizer.from_pretrained(target_folder)
    write_shard(model, tokenizer, PROMPTS, True, 0, TINY.teacher, tmp_path / "shard.safetensors")
    shard = load_file(str(tmp_path / "shard.safetensors"))
    with torch.inference_mode():
        greedy = model(shard["tokens"].long()).logits.argmax(-1)
    answered = shard["kinds"][:, 1:] == 2
    assert answered.any(dim=1).all()
    assert torch.equal(greedy[:, :-1][answered], shard["tokens"][:, 1:][answered].long())
    assert torch.equal(shard["top"][:, :-1, 0][answered], shard["tokens"][:, 1:][answered])
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPTS[1]}], tokenize=False, add_generation_prompt=True
    )
    assert str(tokenizer.decode(shard["tokens"][1])).startswith(str(text))


def test_template_pieces_join_to_the_template(target_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(target_folder)
    chat = chat_tokens(tokenizer)
    assert tokenizer.decode(chat.before_user) == "<s>user "
    assert tokenizer.decode(chat.after_user) == "<e>\n<s>assistant "
    assert tokenizer.decode(chat.between) == "<e>\n<s>user "


def test_training_raises_agreement_and_lowers_the_loss(target_folder: Path, tmp_path: Path) -> None:
    recipe = replace(TINY, learning_rate=1e-2, match_steps=20, total_steps=120, checkpoint_steps=20)
    # a random target has nothing general to learn: whether training moves the student shows on what it was taught
    taught = [("question", prompt) for prompt in PROMPTS]
    result = train_drafter(
        target_folder, PROMPTS, recipe, tmp_path / "work", tmp_path / "out.safetensors", silent, taught, 24
    )
    curve = [json.loads(line) for line in (tmp_path / "work" / "curve.jsonl").read_text().splitlines()]
    assert curve[-1]["loss"] < curve[2]["loss"]  # both of the distilling phase; the first line is of the matching phase
    assert result["all"] > curve[0]["all"] + 0.1


def test_closed_form_fit_lowers_the_distance(target_folder: Path, tmp_path: Path) -> None:
    model, tokenizer = load(target_folder), AutoTokenizer.from_pretrained(target_folder)
    write_shard(model, tokenizer, PROMPTS, False, 0, TINY.teacher, tmp_path / "shard.safetensors")
    store = distill_drafter.ChatStore([tmp_path / "shard.safetensors"])
    copied, fitted = (
        distill_drafter.fit_down_projections(
            make_student(model, TINY.layers), store, replace(TINY, fit_ridge=ridge), silent
        )
        for ridge in (1e9, 1e-3)
    )
    assert fitted[-1] < copied[-1]


def test_resume_after_a_kill_gives_the_same_bytes(
    target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_drafter(target_folder, PROMPTS, TINY, tmp_path / "a", tmp_path / "a.safetensors", silent)

    def killed(stage: str, done: int, total: int) -> None:
        if (stage, done) in stops:
            stops.remove((stage, done))
            raise KeyboardInterrupt

    stops = [("teach", 1), ("fit", 3), ("train", 13)]
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            train_drafter(target_folder, PROMPTS, TINY, tmp_path / "b", tmp_path / "b.safetensors", killed)
        assert not (tmp_path / "b.safetensors").exists()
    train_drafter(target_folder, PROMPTS, TINY, tmp_path / "b", tmp_path / "b.safetensors", killed)
    assert not stops
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_learning_rate_rises_and_falls_to_zero() -> None:
    rates = [distill_drafter.learning_rate(TINY, step) for step in range(TINY.total_steps + 1)]
    assert rates[:3] == pytest.approx([1.5e-3, 3e-3, 3e-3])
    assert rates[11] == pytest.approx(1.5e-3)
    assert rates[20] == 0


def test_work_of_another_recipe_target_or_prompts_is_not_continued(target_folder: Path, tmp_path: Path) -> None:
    work, held_out = tmp_path / "work", [("chat", PROMPTS[0])]

    def claim(*given: Any) -> None:
        distill_drafter._claim(work, *given)

    work.mkdir()
    claim(TINY, target_folder, PROMPTS, held_out)
    claim(TINY, target_folder, PROMPTS, held_out)
    other = save_tiny(tmp_path / "other", seed=7)
    for given in (
        (replace(TINY, learning_rate=1.0), target_folder, PROMPTS, held_out),
        (TINY, other, PROMPTS, held_out),
        (TINY, target_folder, PROMPTS[1:], held_out),
        (TINY, target_folder, PROMPTS, []),
    ):
        with pytest.raises(UserError, match="another recipe, target or prompts"):
            claim(*given)


def test_recipe_that_does_not_end_at_the_last_layer_is_refused(target_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"last layer \(4\)"):
        train_drafter(target_folder, PROMPTS, DrafterRecipe(), tmp_path / "work", tmp_path / "out", silent)
