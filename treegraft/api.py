"""The library for people: a trained scheduler with its models, behind transformers' own ``generate`` interface.

::

    graft = TreeGraft.from_pretrained("my-pair")
    inputs = graft.tokenizer("Once upon a time", return_tensors="pt")
    ids = graft.generate(**inputs, max_new_tokens=100)
    ids = graft.model.generate(**inputs, max_new_tokens=100, custom_generate=graft.custom_generate)

Both give the text that ``graft.model.generate`` gives alone, sooner.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)
from transformers.generation import GenerateDecoderOnlyOutput

from treegraft.costs import CostModel
from treegraft.decoder import Decoder, Generation
from treegraft.drafters.ngram import table_shape
from treegraft.errors import UserError
from treegraft.generation import (
    GenerationRequest,
    GenerationSettings,
    assembled,
    inferred_mask,
    merged_config,
    read_config,
    refuse_foreign_processing,
    unpadded,
)
from treegraft.metrics import DecodingMetrics
from treegraft.pair import PairModels, load_models, make_drafters
from treegraft.scheduling.checkpoint import WEIGHTS_FILE, SchedulerConfig, check_fits, load_scheduler
from treegraft.scheduling.features import feature_names
from treegraft.scheduling.network import MarginNetwork
from treegraft.scheduling.policy import FixedSchedule, LearnedScheduler, Scheduler
from treegraft.values.calibration import Calibration

if TYPE_CHECKING:
    from transformers.generation.streamers import BaseStreamer

SCHEDULERS = Path("models/schedulers")
# What transformers hands to a custom_generate besides the settings, and what has no bearing on our own forwards.
_PREPARED = {"attention_mask", "position_ids", "cache", "use_cache", "logits_to_keep"}


def make_decoder(
    models: PairModels,
    config: SchedulerConfig,
    policy: Scheduler,
    rate: float,
    members: Sequence[int] | None = None,
    depth: int | None = None,
) -> Decoder:
    """A decoder with the draft settings, the calibration and the cost model that a scheduler's checkpoint carries.

    Args:
        policy: decides the layers; rate: its tokens per millisecond, which the verified size is chosen by.
        members: indices of the drafters that take part; None for all.
        depth: layers of a step, where they differ from the checkpoint's.

    Raises:
        UserError: the calibration or the cost model is not of these drafters and settings.
    """
    calibration = Calibration.from_json(config.calibration)
    fits = calibration.ngram_table.shape == table_shape(config.ngram)
    if not fits or len(calibration.temperatures) != len(config.drafters):
        raise UserError(
            f"the scheduler of {config.pair} has a calibration of other settings than its own; "
            f"run `pipeline all {config.pair}` again."
        )
    drafters = make_drafters(models, config.ngram, calibration, members)
    costs = CostModel.from_json(config.cost_model)
    settings = config.draft_settings if depth is None else replace(config.draft_settings, depth=depth)
    fallback = FixedSchedule(config.best_fixed)
    return Decoder(models.target, drafters, policy, settings, costs, rate, fallback=fallback)


def learned_scheduler(network: MarginNetwork, config: SchedulerConfig) -> LearnedScheduler:
    """The policy of a checkpoint."""
    known = feature_names(config.depth, len(config.drafters))
    return LearnedScheduler(network, list(config.feature_names), known, config.saving)


class TreeGraft:
    """A target with its drafters and the scheduler that was trained for them.

    One sequence is decoded at a time. An exception or an interrupt in the middle of a request leaves the object ready
    for the next one.

    Attributes:
        config: the scheduler's configuration.
        decoder: what decodes one request.
        last_metrics: counts and times of the last call that came to its end, summed over its sequences; None before.
    """

    def __init__(self, decoder: Decoder, config: SchedulerConfig) -> None:
        self.decoder = decoder
        self.config = config
        self.last_metrics: DecodingMetrics | None = None

    @classmethod
    def from_pretrained(
        cls,
        scheduler: str | Path,
        *,
        target: str | Path | None = None,
        drafters: Mapping[str, str | Path] | None = None,
        device: str = "auto",
        dtype: str = "auto",
        drafter_dtype: str = "auto",
        threads: int | None = None,
        device_map: str | None = None,
    ) -> "TreeGraft":
        """Load a scheduler and its models.

        Args:
            scheduler: a folder that stage distill exported, or a pair whose scheduler lies in models/schedulers/<pair>.
            target: the target's folder; by default ../../targets/<name> from the scheduler's folder.
            drafters: folders of drafter models by name; by default ../../drafters/<name>.
            device: ``auto`` (a GPU if there is one), ``cpu``, ``cuda`` or ``cuda:<n>``.
            dtype: ``auto`` (bfloat16 where the device is fast at it), ``float32``, ``bfloat16`` or ``float16``.
            drafter_dtype: ``auto`` (int8 on CPUs, the target's elsewhere), ``int8`` or one of dtype's. The scheduler
                knows the latencies of the device, dtypes and threads that it was trained with and no others.
            threads: CPU threads of the whole process; None leaves their number as it is.
            device_map: ``auto`` spreads the target over all GPUs; drafters are on ``device`` all the same.

        Raises:
            UserError: there is no such scheduler, a model is missing, or they do not fit each other.
        """
        folder = _scheduler_folder(scheduler)
        network, config = load_scheduler(folder)
        models_folder = folder.resolve().parent.parent
        given = dict(drafters or {})
        if unknown := sorted(given.keys() - set(config.model_drafters)):
            raise UserError(
                f"drafters names {unknown[0]}, which is no drafter model of {config.pair}: "
                f"it has {', '.join(config.model_drafters)}."
            )
        folders = {name: Path(given.get(name, models_folder / "drafters" / name)) for name in config.model_drafters}
        target_folder = Path(target or models_folder / "targets" / config.target)
        for name, place in {config.target: target_folder, **folders}.items():
            if not place.is_dir():
                argument = "target=<folder>" if name == config.target else f"drafters={{'{name}': <folder>}}"
                raise UserError(f"the model {name} of {config.pair} is not in {place}; say where with {argument}.")
        models = load_models(
            (config.target, target_folder),
            [(name, folders.get(name)) for name in config.drafters],
            device,
            dtype,
            drafter_dtype,
            threads,
            device_map,
        )
        check_fits(
            config,
            tokenizer_hashes=models.tokenizer_hashes(),
            depth=config.depth,
            width=config.width,
            drafters=list(config.drafters),
        )
        policy = learned_scheduler(network, config)
        return cls(make_decoder(models, config, policy, config.rate_tokens_per_ms), config)

    @property
    def model(self) -> PreTrainedModel:
        """The target, as transformers' class."""
        return self.decoder.target.module

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The target's tokenizer."""
        return self.decoder.target.tokenizer

    def generate(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        generation_config: GenerationConfig | None = None,
        seed: int | None = None,
        streamer: "BaseStreamer | None" = None,
        **settings: Unpack[GenerationSettings],
    ) -> torch.LongTensor | GenerateDecoderOnlyOutput:
        """Continue prompts as transformers' ``generate`` does, with its argument names, defaults and results.

        Greedy text is transformers' own, in float32 token by token. Sampled text has the same law, but not
        transformers' draws: ours are one number a token of numpy's generator, whatever is drafted.

        Args:
            input_ids: int [batch, width], padded on the left where lengths differ.
            attention_mask: int or bool [batch, width], 0 for padding; inferred from the pad token if not given, where
                that is no EOS.
            generation_config: settings for this call; the model's own fill in what it leaves unset.
            seed: of sampling; row r of the result is drawn with seed + r. None takes a seed from torch's generator.
            streamer: gets the prompt, then each step's tokens (int64 [n]), and its ``end``; for one sequence only.
            settings: see ``GenerationSettings``. An answer ends at any id of ``eos_token_id``; where neither the
                settings nor the model's generation config name one, at those of its tokenizer and config.

        Returns:
            int64 [batch * num_return_sequences, width + new], shorter answers padded on the right; with
            ``return_dict_in_generate`` transformers' output with ``sequences`` and, where asked for, ``scores`` and
            ``logits``: one float32 [rows, vocabulary] per new token, NaN in rows that have ended. The vocabulary is
            the tokens that exist; columns that pad a model's head are left out.

        Raises:
            UserError: an argument is unknown, outside its range or not supported; a prompt is empty or too long.
        """
        config = merged_config(self.model.generation_config, generation_config, dict(settings))
        if attention_mask is None:
            attention_mask = inferred_mask(input_ids, config)
        prompts = unpadded(input_ids, attention_mask)
        request = read_config(config, input_ids.shape[1], seed, self.decoder.target.eos_token_ids)
        if streamer is None:
            answers = self._answers(prompts, request)
        else:
            if len(prompts) * request.num_return_sequences > 1:
                raise UserError("a streamer takes one sequence; give one prompt and no num_return_sequences.")
            streamer.put(input_ids.cpu())
            answers = self._answers(prompts, request, lambda tokens: streamer.put(torch.tensor(tokens)))
            streamer.end()
        return assembled(input_ids, answers, request)

    def custom_generate(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        seed: int | None = None,
        **model_kwargs: Any,
    ) -> torch.LongTensor | GenerateDecoderOnlyOutput:
        """For ``graft.model.generate(**inputs, custom_generate=graft.custom_generate)``; transformers calls it.

        It heeds the settings that ``generate`` heeds, but transformers keeps two arguments from a custom function: stop
        strings are refused by transformers itself, and a streamer gets the prompt and nothing more. Use
        ``TreeGraft.generate`` for these.

        Args:
            model: must be ``self.model``.
            input_ids: int [rows, width]: transformers has repeated the prompts ``num_return_sequences`` times.
            seed: as for ``generate``; the one argument that goes through transformers to here.

        Raises:
            UserError: as ``generate``; also for logits processors, stopping criteria and inputs of the user's own.
        """
        if model is not self.model:
            raise UserError("custom_generate decodes with its own target; call generate of graft.model.")
        if strange := sorted(model_kwargs.keys() - _PREPARED):
            raise UserError(f"TreeGraft's generate does not take {', '.join(strange)}; leave that out.")
        cache = model_kwargs.get("cache")
        if cache is not None and cache.get_seq_length() > 0:
            raise UserError("TreeGraft's generate does not go on from a cache; leave it out and give the whole text.")
        mask = model_kwargs.get("attention_mask")
        # transformers drops a mask that hides nothing
        mask = torch.ones_like(input_ids) if mask is None else mask
        positions = model_kwargs.get("position_ids")
        if positions is not None and (((mask.cumsum(-1) - 1) != positions) & (mask != 0)).any():
            raise UserError("TreeGraft's generate does not take position_ids; leave them out.")
        request = replace(read_config(generation_config, input_ids.shape[1], seed), num_return_sequences=1)
        refuse_foreign_processing(logits_processor, stopping_criteria, request.sampling)
        return assembled(input_ids, self._answers(unpadded(input_ids, mask), request), request)

    def _answers(
        self,
        prompts: list[list[int]],
        request: GenerationRequest,
        on_tokens: Callable[[list[int]], None] | None = None,
    ) -> list[Generation]:
        """Decode every row, one by one."""
        metrics = DecodingMetrics()
        answers = []
        for row in range(len(prompts) * request.num_return_sequences):
            answer = self.decoder.generate(
                prompts[row // request.num_return_sequences],
                request.max_new_tokens,
                request.sampling_of(row),
                request.stop,
                on_tokens,
                request.record,
                request.eos,
            )
            metrics.add(answer.metrics)
            answers.append(answer)
            if answer.finish == "context":
                target = self.decoder.target
                warnings.warn(
                    f"the answer ends with the context of {target.name}, {target.context_limit} tokens with the prompt "
                    "(of a model with a sliding window that window).",
                    stacklevel=3,
                )
        self.last_metrics = metrics
        return answers


def _scheduler_folder(scheduler: str | Path) -> Path:
    """The folder itself, or models/schedulers/<pair>."""
    for folder in (Path(scheduler), SCHEDULERS / scheduler):
        if (folder / WEIGHTS_FILE).is_file():
            return folder
    raise UserError(
        f"there is no scheduler in {scheduler} or {SCHEDULERS / scheduler}; `pipeline all <pair>` trains one."
    )
