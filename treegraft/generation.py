"""transformers' generation arguments, read as this library's own; what it cannot do is refused, not ignored.

Priorities and defaults are those of transformers' ``generate``: an argument of the call goes before the call's
``generation_config``, that before the model's own, and that before transformers' defaults.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import EosTokenCriteria, GenerateDecoderOnlyOutput, MaxLengthCriteria

from treegraft.decoder import Generation
from treegraft.errors import UserError, one_line
from treegraft.sampling import SamplingSettings, TokenChooser

DEFAULT_NEW_TOKENS = 20  # transformers', where neither max_new_tokens nor max_length is set
DEFAULT_TOP_K = 50  # transformers', where a sampled request does not set it
SUPPORTED = {
    "max_new_tokens",
    "max_length",
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "num_return_sequences",
    "stop_strings",
    "eos_token_id",
    "pad_token_id",
    "return_dict_in_generate",
    "output_scores",
    "output_logits",
}
# How transformers keeps and compiles things, and where a text without a prompt would begin: no text depends on it here.
WITHOUT_EFFECT = {
    "use_cache",
    "cache_implementation",
    "cache_config",
    "max_cache_len",
    "compile_config",
    "disable_compile",
    "prefill_chunk_size",
    "bos_token_id",
    "decoder_start_token_id",
    "transformers_version",
}
SAMPLING_ONLY = {"top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"}  # transformers too skips them in greedy decoding
_NUMBERS = ("penalty", "temperature", "top_k", "top_p", "min_p")  # where logits processors keep their setting


class GenerationSettings(TypedDict, total=False):
    """The generation arguments that ``TreeGraft.generate`` heeds, with transformers' names, meanings and defaults."""

    max_new_tokens: int
    """Tokens after the prompt at most; 20 where neither this nor max_length is set."""
    max_length: int
    """The same with the prompt (and its padding) counted in."""
    do_sample: bool
    """Draw tokens; False takes the likeliest one. The next four count only where this is True."""
    temperature: float
    top_k: int
    """50 unless set; 0 turns it off."""
    top_p: float
    min_p: float
    repetition_penalty: float
    num_return_sequences: int
    """Answers to each prompt; above 1 only with do_sample."""
    stop_strings: str | Sequence[str]
    """Texts that end an answer; the token that completes one is the last."""
    eos_token_id: int | Sequence[int]
    pad_token_id: int
    return_dict_in_generate: bool
    output_scores: bool
    """With return_dict_in_generate: what every token was chosen from, after the logits processors."""
    output_logits: bool
    """With return_dict_in_generate: the target's logits before every token."""


@dataclass(frozen=True)
class GenerationRequest:
    """One call of ``generate``, resolved."""

    max_new_tokens: int
    sampling: SamplingSettings
    """Row r of the result adds r to its seed."""
    stop: tuple[str, ...]
    eos: tuple[int, ...]
    pad: int
    num_return_sequences: int
    return_dict: bool
    scores: bool
    logits: bool

    def sampling_of(self, row: int) -> SamplingSettings:
        """The settings of one row of the result."""
        return replace(self.sampling, seed=self.sampling.seed + row)

    @property
    def record(self) -> bool:
        """Whether logits must be kept."""
        return self.return_dict and (self.scores or self.logits)


def merged_config(
    of_model: GenerationConfig | None, of_call: GenerationConfig | None, settings: dict[str, Any]
) -> GenerationConfig:
    """The generation config of a call; UserError for an argument that transformers does not know or takes for wrong."""
    config = copy.deepcopy(of_call) if of_call is not None else GenerationConfig()
    try:
        if of_model is not None:
            config.update(**of_model.to_dict(), defaults_only=True)
        unknown = config.update(**settings)
    except ValueError as error:
        raise UserError(f"the generation settings do not hold together: {one_line(error).rstrip('.')}.") from error
    if unknown:
        raise UserError(f"TreeGraft's generate does not take {', '.join(sorted(unknown))}; leave that out.")
    return config


def read_config(
    config: GenerationConfig, prompt_width: int, seed: int | None, eos: tuple[int, ...] = ()
) -> GenerationRequest:
    """Resolve a merged config.

    Args:
        prompt_width: tokens of the prompts with their padding.
        seed: of the first row; None draws one from torch's own generator, which ``torch.manual_seed`` governs.
        eos: ids that end an answer where the config names none.

    Raises:
        UserError: a setting is outside its range or asks for something that is not supported.
    """
    sampled = bool(config.do_sample)
    _refuse_unsupported(config, sampled)
    if config.max_new_tokens is not None:
        limit = config.max_new_tokens
    else:
        limit = DEFAULT_NEW_TOKENS if config.max_length is None else config.max_length - prompt_width
    if limit < 1:
        raise UserError(
            f"max_length is {config.max_length}, but the prompt has {prompt_width} tokens already; "
            "raise it or set max_new_tokens."
        )
    ids = _ids(config.eos_token_id) or eos
    stop = config.stop_strings or ()
    return GenerationRequest(
        max_new_tokens=limit,
        sampling=_sampling(config, sampled, seed),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        eos=ids,
        pad=config.pad_token_id if config.pad_token_id is not None else ids[0] if ids else 0,
        num_return_sequences=config.num_return_sequences or 1,
        return_dict=bool(config.return_dict_in_generate),
        scores=bool(config.output_scores),
        logits=bool(config.output_logits),
    )


def _refuse_unsupported(config: GenerationConfig, sampled: bool) -> None:
    neutral = GenerationConfig._get_default_generation_params()
    passed = SUPPORTED | WITHOUT_EFFECT | (set() if sampled else SAMPLING_ONLY)
    # Entries that transformers itself does not know (checkpoints carry some) mean nothing to its `generate` either.
    for name in sorted(vars(GenerationConfig()).keys() - passed):
        value = getattr(config, name, None)
        if not name.startswith("_") and value is not None and value is not False and value != neutral.get(name):
            raise UserError(
                f"{name}={value} is not supported by TreeGraft; leave it out or use the model's own generate."
            )


def _sampling(config: GenerationConfig, sampled: bool, seed: int | None) -> SamplingSettings:
    penalty = 1.0 if config.repetition_penalty is None else config.repetition_penalty
    if not sampled:
        return SamplingSettings(repetition_penalty=penalty)
    temperature = 1.0 if config.temperature is None else config.temperature
    if temperature == 0:
        raise UserError("temperature is 0 with do_sample=True; set do_sample=False for greedy decoding.")
    return SamplingSettings(
        temperature=temperature,
        top_k=DEFAULT_TOP_K if config.top_k is None else config.top_k,
        top_p=1.0 if config.top_p is None else config.top_p,
        min_p=config.min_p or 0.0,
        repetition_penalty=penalty,
        seed=int(torch.randint(2**31, ())) if seed is None else seed,
    )


def _ids(value: Any) -> tuple[int, ...]:
    """A token id, a list or a tensor of some, or None."""
    if value is None:
        return ()
    return tuple(torch.as_tensor(value).flatten().tolist())


def refuse_foreign_processing(
    processors: LogitsProcessorList, criteria: StoppingCriteriaList, sampling: SamplingSettings
) -> None:
    """UserError if transformers prepared more for a call than ``sampling``, a length limit and EOS."""

    def described(several: LogitsProcessorList) -> list[tuple[Any, ...]]:
        # transformers makes a processor of min_p 0 too, which changes nothing.
        active = [one for one in several if getattr(one, "min_p", None) != 0]
        return [(type(one), *(getattr(one, name, None) for name in _NUMBERS)) for one in active]

    own = TokenChooser(sampling).processors
    if described(processors) != described(own):
        raise UserError("logits processors of your own are not supported by TreeGraft; leave them out.")
    foreign = [type(one).__name__ for one in criteria if not isinstance(one, MaxLengthCriteria | EosTokenCriteria)]
    if foreign:
        raise UserError(f"the stopping criterion {foreign[0]} is not supported by TreeGraft; leave it out.")


def inferred_mask(input_ids: torch.Tensor, config: GenerationConfig) -> torch.Tensor:
    """The attention mask [batch, width] of prompts without one, as transformers infers it from pads that are no EOS."""
    pad = config.pad_token_id
    if pad is None or pad in _ids(config.eos_token_id):
        return torch.ones_like(input_ids)
    return input_ids.ne(pad).long()


def unpadded(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> list[list[int]]:
    """The prompts (int [batch, width]) without the padding that the mask (of the same shape) hides at their left.

    Raises:
        UserError: the shapes are no batch of prompts, or the mask hides anything else.
    """
    if input_ids.dim() != 2 or input_ids.is_floating_point():
        raise UserError(f"input_ids has shape {list(input_ids.shape)}; token ids [batch, width] are needed.")
    if attention_mask.shape != input_ids.shape:
        shapes = f"{list(attention_mask.shape)}, but input_ids {list(input_ids.shape)}"
        raise UserError(f"attention_mask has shape {shapes}; they must be equal.")
    shown = attention_mask != 0
    if not (shown[:, 1:] >= shown[:, :-1]).all():
        raise UserError("attention_mask hides tokens after the first that it shows; pad prompts on the left.")
    return [row[keep].tolist() for row, keep in zip(input_ids, shown, strict=True)]


def assembled(
    input_ids: torch.Tensor, answers: list[Generation], request: GenerationRequest
) -> torch.LongTensor | GenerateDecoderOnlyOutput:
    """The answers as ``generate`` returns them, on the device of the prompts.

    Args:
        input_ids: int [batch, width]; answers: of its rows, ``num_return_sequences`` each, prompt by prompt.

    Returns:
        int64 [batch * num_return_sequences, width + longest answer], shorter answers padded on the right; or that as
        ``sequences`` beside ``scores`` and ``logits``: for each new token float32 [rows, vocabulary], NaN in rows that
        have ended.
    """
    device = input_ids.device
    tokens = [torch.tensor(answer.tokens, device=device) for answer in answers]
    new = pad_sequence(tokens, batch_first=True, padding_value=request.pad)
    prompts = input_ids.repeat_interleave(request.num_return_sequences, dim=0)
    sequences: Any = torch.cat([prompts.long(), new], dim=1)
    if not request.return_dict:
        return sequences

    def by_step(rows: list[torch.Tensor | None]) -> Any:
        recorded = [row.float().to(device) for row in rows if row is not None]
        return pad_sequence(recorded, batch_first=True, padding_value=float("nan")).unbind(1)

    return GenerateDecoderOnlyOutput(
        sequences=sequences,
        scores=by_step([answer.scores for answer in answers]) if request.scores else None,
        logits=by_step([answer.logits for answer in answers]) if request.logits else None,
    )
