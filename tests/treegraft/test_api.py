"""The library for people against transformers' own ``generate`` and against the decoder behind it."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    GenerationConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    MaxTimeCriteria,
    MinNewTokensLengthLogitsProcessor,
    StoppingCriteriaList,
)
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer

from tests.treegraft.tiny import save_tiny
from tests.treegraft.tiny_scheduler import DRAFTER, PAIR, TARGET, make_scheduler
from treegraft.api import TreeGraft
from treegraft.decoder import Decoder
from treegraft.errors import UserError
from treegraft.sampling import SamplingSettings
from treegraft.scheduling.checkpoint import load_scheduler, save_scheduler
from treegraft.scheduling.policy import never
from treegraft.settings import NgramSettings

PROMPT = torch.tensor([[3, 7, 3, 7, 5]])
PADDED = torch.tensor([[1, 1, 1, 9, 4], [3, 7, 3, 7, 5]])  # the tokenizer pads with </s>, id 1
MASK = torch.tensor([[0, 0, 0, 1, 1], [1, 1, 1, 1, 1]])
NEW = 30
CLOSE: Any = {"rtol": 1e-4, "atol": 1e-4}  # a tree is another batch shape than single tokens
SAMPLED: Any = {"do_sample": True, "temperature": 0.8, "top_k": 12, "top_p": 0.95, "min_p": 0.02}


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_scheduler(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def graft(scheduler: Path) -> TreeGraft:
    return TreeGraft.from_pretrained(scheduler, device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def stock(scheduler: Path) -> Any:
    """The target as transformers alone runs it."""
    return LlamaForCausalLM.from_pretrained(scheduler.parents[1] / "targets" / TARGET).eval()


class Recorder(BaseStreamer):
    """Keeps what it gets; raises what it is told to at its n-th piece."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.pieces: list[torch.Tensor] = []
        self.ended = False
        self.stop_at = stop_at

    def put(self, value: torch.Tensor) -> None:
        self.pieces.append(value)
        if len(self.pieces) == self.stop_at:
            raise KeyboardInterrupt

    def end(self) -> None:
        self.ended = True


def refusal(graft: TreeGraft, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(UserError) as caught:
        graft.generate(*args, **kwargs)
    message = str(caught.value)
    assert message.endswith(".")
    assert "\n" not in message
    return message


def plain(graft: TreeGraft, prompt: list[int], sampling: SamplingSettings) -> list[int]:
    decoder = Decoder(graft.decoder.target, [], never(), graft.decoder.settings)
    return decoder.generate(prompt, NEW, sampling).tokens


# --- loading ---------------------------------------------------------------------------------------------------------


def test_a_pairs_slug_means_its_scheduler_below_the_current_folder(
    scheduler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(scheduler.parents[2])
    graft = TreeGraft.from_pretrained(PAIR, device="cpu", dtype="float32")
    assert graft.config.pair == PAIR
    assert [drafter.name for drafter in graft.decoder.drafters] == ["ngram", DRAFTER]
    assert graft.decoder.tokens_per_ms == graft.config.rate_tokens_per_ms
    assert graft.decoder.costs is not None


def test_models_may_lie_elsewhere(scheduler: Path, tmp_path: Path) -> None:
    alone = shutil.copytree(scheduler, tmp_path / "scheduler")
    with pytest.raises(UserError, match=f"the model {TARGET} of {PAIR} is not in .*; say where with target=<folder>"):
        TreeGraft.from_pretrained(alone)
    models = scheduler.parents[1]
    target = models / "targets" / TARGET
    with pytest.raises(UserError, match=f"say where with drafters={{'{DRAFTER}': <folder>}}"):
        TreeGraft.from_pretrained(alone, target=target)
    with pytest.raises(UserError, match="drafters names other, which is no drafter model"):
        TreeGraft.from_pretrained(alone, target=target, drafters={"other": target})
    drafters = {DRAFTER: str(models / "drafters" / DRAFTER)}
    graft = TreeGraft.from_pretrained(str(alone), target=target, drafters=drafters, device="cpu")
    assert graft.decoder.target.folder == target


def test_refuses_what_does_not_fit(scheduler: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no scheduler in nowhere"):
        TreeGraft.from_pretrained("nowhere")
    network, config = load_scheduler(scheduler)
    stale = dataclasses.replace(config, ngram=NgramSettings(3, 2, 0, 3))  # as before tokens were recycled
    save_scheduler(tmp_path / "models/schedulers/stale", network, stale)
    models = scheduler.parents[1]
    where: Any = {"target": models / "targets" / TARGET, "drafters": {DRAFTER: models / "drafters" / DRAFTER}}
    with pytest.raises(UserError, match="has a calibration of other settings than its own"):
        TreeGraft.from_pretrained(tmp_path / "models/schedulers/stale", device="cpu", **where)
    other = save_tiny(tmp_path / "other", vocab_size=60)
    with pytest.raises(UserError, match="The tokenizer of tiny-"):
        TreeGraft.from_pretrained(scheduler, target=other, drafters={DRAFTER: other}, device="cpu")


# --- results ---------------------------------------------------------------------------------------------------------


def test_greedy_text_scores_and_logits_are_transformers_own(graft: TreeGraft, stock: Any) -> None:
    settings: Any = {
        "max_new_tokens": NEW,
        "repetition_penalty": 1.3,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
    }
    expected = stock.generate(PROMPT, **settings)
    found = graft.generate(PROMPT, **settings)
    assert isinstance(found, GenerateDecoderOnlyOutput)
    assert found.sequences.tolist() == expected.sequences.tolist()
    torch.testing.assert_close(found.scores, expected.scores, **CLOSE)
    torch.testing.assert_close(found.logits, expected.logits, **CLOSE)
    metrics = graft.last_metrics
    assert metrics is not None
    assert metrics.tokens == len(expected.scores)
    assert metrics.calls[0] > 0
    assert metrics.calls[1] > 0
    ids = graft.generate(PROMPT, max_new_tokens=NEW, repetition_penalty=1.3)
    assert isinstance(ids, torch.Tensor)
    assert ids.tolist() == expected.sequences.tolist()
    only = graft.generate(PROMPT, max_new_tokens=2, return_dict_in_generate=True)
    assert isinstance(only, GenerateDecoderOnlyOutput)
    assert only.scores is only.logits is None


def test_defaults_and_priorities_are_transformers(graft: TreeGraft, stock: Any) -> None:
    assert graft.generate(PROMPT).tolist() == stock.generate(PROMPT).tolist()  # type: ignore[union-attr]
    config = GenerationConfig(max_new_tokens=7, repetition_penalty=1.5)
    for settings in ({}, {"max_new_tokens": 9}):
        found: Any = graft.generate(PROMPT, generation_config=config, **settings)  # type: ignore[arg-type]
        assert found.tolist() == stock.generate(PROMPT, generation_config=config, **settings).tolist()
    longest: Any = graft.generate(PROMPT, max_length=9)
    assert longest.tolist() == stock.generate(PROMPT, max_length=9).tolist()
    assert refusal(graft, PROMPT, max_length=5) == (
        "max_length is 5, but the prompt has 5 tokens already; raise it or set max_new_tokens."
    )


def test_left_padded_batches_are_right_padded_where_an_answer_ends(graft: TreeGraft, stock: Any) -> None:
    text = stock.generate(PADDED, attention_mask=MASK, max_new_tokens=NEW, pad_token_id=2)
    eos = int(text[0, PADDED.shape[1] + 3])  # ends the first answer soon
    settings: Any = {"max_new_tokens": NEW, "eos_token_id": [eos, 1], "pad_token_id": 2}
    expected = stock.generate(PADDED, attention_mask=MASK, **settings)
    found: Any = graft.generate(PADDED, MASK, **settings)
    assert found.tolist() == expected.tolist()
    recorded: Any = graft.generate(PADDED, MASK, return_dict_in_generate=True, output_logits=True, **settings)
    new = expected.shape[1] - PADDED.shape[1]
    assert [tuple(step.shape) for step in recorded.logits] == [(2, 64)] * new
    ended = (expected[:, PADDED.shape[1] :] == 2).tolist()
    assert [[bool(step[row].isnan().all()) for step in recorded.logits] for row in range(2)] == ended
    # transformers infers the mask from pads that are no EOS
    inferred: Any = graft.generate(PADDED.where(PADDED != 1, 2), pad_token_id=2, max_new_tokens=NEW)
    assert inferred[:, 5:].tolist() == text[:, 5:].tolist()


def test_sampled_text_is_that_of_plain_decoding_with_the_same_seed(graft: TreeGraft) -> None:
    sampling = SamplingSettings(temperature=0.8, top_k=12, top_p=0.95, min_p=0.02, seed=5)
    found: Any = graft.generate(PROMPT, max_new_tokens=NEW, seed=5, **SAMPLED)
    assert found[0, 5:].tolist() == plain(graft, PROMPT[0].tolist(), sampling)
    drafted = graft.decoder.generate(PROMPT[0].tolist(), NEW, sampling)
    assert found[0, 5:].tolist() == drafted.tokens
    default: Any = graft.generate(PROMPT, max_new_tokens=NEW, do_sample=True, seed=5)
    top_50 = SamplingSettings(temperature=1.0, top_k=50, seed=5)
    assert default[0, 5:].tolist() == plain(graft, PROMPT[0].tolist(), top_50), "transformers' defaults"


def test_several_sequences_are_drawn_with_seeds_that_follow(graft: TreeGraft) -> None:
    found: Any = graft.generate(PADDED, MASK, max_new_tokens=NEW, num_return_sequences=2, seed=8, **SAMPLED)
    metrics = graft.last_metrics
    assert metrics is not None
    assert metrics.prompt_tokens == 2 * (2 + 5)
    assert found.shape[0] == 4
    rows = [([9, 4], 8), ([9, 4], 9), ([3, 7, 3, 7, 5], 10), ([3, 7, 3, 7, 5], 11)]
    for row, (prompt, seed) in zip(found.tolist(), rows, strict=True):
        one: Any = graft.generate(torch.tensor([prompt]), max_new_tokens=NEW, seed=seed, **SAMPLED)
        answer = one[0, len(prompt) :].tolist()
        assert row[5 : 5 + len(answer)] == answer
        assert set(row[5 + len(answer) :]) <= {1}


def test_metrics_are_summed_over_the_sequences(graft: TreeGraft) -> None:
    graft.generate(PADDED, MASK, max_new_tokens=6, eos_token_id=63)
    metrics = graft.last_metrics
    assert metrics is not None
    assert (metrics.prompt_tokens, metrics.tokens) == (2 + 5, 12)
    assert sum(metrics.calls) % 3 == 0
    assert metrics.steps == len(metrics.accepted_lengths)
    assert metrics.processed[TARGET] >= 2 + 5 + 12 - 2


def test_without_a_seed_torchs_generator_decides(graft: TreeGraft) -> None:
    def draw() -> list[int]:
        found: Any = graft.generate(PROMPT, max_new_tokens=NEW, do_sample=True)
        return list(found[0].tolist())

    torch.manual_seed(3)
    first, second = draw(), draw()
    torch.manual_seed(3)
    assert draw() == first != second


# --- streaming and interrupts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ends_by", ["length", "eos", "stop string"])
def test_a_streamer_gets_the_prompt_then_every_token_and_nothing_behind_the_end(
    graft: TreeGraft, stock: Any, ends_by: str
) -> None:
    text = stock.generate(PROMPT, max_new_tokens=NEW)[0].tolist()
    settings: Any = {"max_new_tokens": NEW}
    expected = text
    if ends_by == "eos":
        settings["eos_token_id"] = text[14]
        expected = text[: text.index(text[14], 5) + 1]
    elif ends_by == "stop string":
        word = settings["stop_strings"] = f"w{text[14]}"
        # transformers' own criterion cannot read the tiny tokenizer's vocabulary
        expected = next(text[:end] for end in range(6, 16) if word in graft.tokenizer.decode(text[5:end]))
    streamer = Recorder()
    found: Any = graft.generate(PROMPT, streamer=streamer, **settings)
    assert streamer.ended
    assert streamer.pieces[0].tolist() == PROMPT.tolist()
    assert all(piece.dim() == 1 for piece in streamer.pieces[1:])
    assert torch.cat(streamer.pieces[1:]).tolist() == found[0, 5:].tolist()
    assert found[0].tolist() == expected


def test_an_interrupt_leaves_it_usable(graft: TreeGraft, stock: Any) -> None:
    streamer = Recorder(stop_at=4)
    with pytest.raises(KeyboardInterrupt):
        graft.generate(PROMPT, max_new_tokens=NEW, streamer=streamer)
    assert not streamer.ended
    expected = stock.generate(PROMPT, max_new_tokens=NEW)
    for _ in range(2):
        found: Any = graft.generate(PROMPT, max_new_tokens=NEW)
        assert found.tolist() == expected.tolist()


# --- custom_generate -------------------------------------------------------------------------------------------------


def test_custom_generate_gives_transformers_own_result(graft: TreeGraft, stock: Any) -> None:
    model: Any = graft.model
    settings: Any = {"max_new_tokens": NEW, "repetition_penalty": 1.2}
    for inputs in ({"input_ids": PROMPT}, {"input_ids": PADDED, "attention_mask": MASK}):
        expected = stock.generate(**inputs, **settings)
        steps = graft.last_metrics
        found = model.generate(**inputs, **settings, custom_generate=graft.custom_generate)
        assert found.tolist() == expected.tolist()
        assert model.generate(**inputs, **settings).tolist() == expected.tolist(), "transformers alone still can"
        assert graft.last_metrics is not steps, "the tree decoder has done it"
    for other in ({"max_length": 11}, {"eos_token_id": int(expected[1, 12])}, {}):
        found = model.generate(PROMPT, **other, custom_generate=graft.custom_generate)
        assert found.tolist() == stock.generate(PROMPT, **other).tolist()
    recorded: Any = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    expected = stock.generate(PROMPT, **settings, **recorded)
    found = model.generate(PROMPT, **settings, **recorded, custom_generate=graft.custom_generate)
    torch.testing.assert_close(found.scores, expected.scores, **CLOSE)
    torch.testing.assert_close(found.logits, expected.logits, **CLOSE)


def test_custom_generate_samples_as_generate_does(graft: TreeGraft) -> None:
    settings: Any = SAMPLED | {"max_new_tokens": NEW, "num_return_sequences": 2, "seed": 8, "repetition_penalty": 1.2}
    model: Any = graft.model
    found = model.generate(PADDED, attention_mask=MASK, custom_generate=graft.custom_generate, **settings)
    expected: Any = graft.generate(PADDED, MASK, **settings)
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"min_new_tokens": 3}, "min_length=8 is not supported"),
        ({"num_beams": 2}, "num_beams=2 is not supported"),
        (
            {"logits_processor": LogitsProcessorList([MinNewTokensLengthLogitsProcessor(5, 3, 1)])},
            "logits processors of your own",
        ),
        ({"stopping_criteria": StoppingCriteriaList([MaxTimeCriteria(9.0)])}, "MaxTimeCriteria is not supported"),
        ({"position_ids": torch.arange(5)[None] + 2}, "position_ids"),
    ],
)
def test_custom_generate_refuses_what_it_cannot_do(graft: TreeGraft, settings: Any, part: str) -> None:
    model: Any = graft.model
    with pytest.raises(UserError, match=part):
        model.generate(PROMPT, max_new_tokens=4, custom_generate=graft.custom_generate, **settings)


def test_custom_generate_refuses_another_model(graft: TreeGraft, stock: Any) -> None:
    with pytest.raises(UserError, match=r"call generate of graft\.model"):
        stock.generate(PROMPT, custom_generate=graft.custom_generate)


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"num_beams": 4}, "num_beams=4 is not supported"),
        ({"no_repeat_ngram_size": 2}, "no_repeat_ngram_size=2"),
        ({"output_attentions": True}, "output_attentions=True"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens=3"),
        ({"do_sample": True, "typical_p": 0.5}, "typical_p=0.5"),
        ({"generation_config": GenerationConfig(min_new_tokens=2)}, "min_new_tokens=2"),
        ({"temprature": 0.5}, "does not take temprature"),
        ({"logits_processor": []}, "does not take logits_processor"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"num_return_sequences": 2}, "num_return_sequences"),
        ({"do_sample": True, "temperature": 0.0}, "do_sample=False for greedy"),
        ({"do_sample": True, "top_p": 1.5}, "top_p is 1.5"),
        ({"do_sample": True, "num_return_sequences": 2, "streamer": Recorder()}, "a streamer takes one sequence"),
        ({"attention_mask": torch.ones(1, 4)}, "attention_mask has shape [1, 4], but input_ids [1, 5]"),
        ({"attention_mask": torch.tensor([[1, 1, 1, 1, 0]])}, "pad prompts on the left"),
        ({"attention_mask": torch.zeros(1, 5)}, "the prompt is empty"),
        ({"stop_strings": ["a", ""]}, "a stop string is empty"),
    ],
)
def test_generate_refuses_in_one_sentence(graft: TreeGraft, settings: Any, part: str) -> None:
    assert part in refusal(graft, PROMPT, **settings)


def test_generate_takes_neutral_values_of_what_it_does_not_support(graft: TreeGraft, stock: Any) -> None:
    neutral: Any = {"num_beams": 1, "use_cache": True, "no_repeat_ngram_size": 0, "output_attentions": False}
    found: Any = graft.generate(PROMPT, **neutral)
    assert found.tolist() == stock.generate(PROMPT).tolist()
    assert "input_ids has shape [5]" in refusal(graft, PROMPT[0])
