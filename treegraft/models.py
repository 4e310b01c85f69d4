"""Loads a transformers folder as the `LanguageModel` that every other module works on.

It knows which models can be decoded speculatively at all (the key/value cache of a rejected token must be removable,
and a tree needs position ids and a 4-D attention mask) and says so in one sentence for the others. It does not fetch:
see sources.py.
"""

import inspect
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from treegraft.cpu_kernels import can_quantize, speed_up
from treegraft.draft_vocabulary import read_draft_vocabulary, restrict_head
from treegraft.errors import UserError, one_line
from treegraft.lean import LeanForward, lean_forward
from treegraft.model_folder import locate
from treegraft.tree import IntArray

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# Layers whose whole state is keys and values per token. Everything else (linear attention, convolutions, Mamba,
# attention with compressed or indexed keys) keeps something that cropping the cache does not restore: FIELD_REPORTS 4,
# vllm #39273.
ROLLBACK_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "attention", "dense", "sparse"}
# Families that the layer types do not give away, because their configuration has none or theirs may be left empty.
RECURRENT_FAMILIES = (
    "bamba",
    "dory",
    "falcon_h1",
    "falcon_mamba",
    "granitemoehybrid",
    "griffin",
    "inkling",
    "jamba",
    "kimi_linear",
    "lfm2",
    "lfm3",
    "mamba",
    "minimax_text",
    "nemotron_h",
    "olmo_hybrid",
    "qwen3_next",
    "qwen3_5",
    "recurrent_gemma",
    "retnet",
    "rwkv",
    "xlstm",
    "zamba",
    "zaya",
)
RECURRENT_FIELDS = (
    "ssm_cfg",
    "ssm_state_size",
    "state_size",
    "mamba_d_state",
    "mamba_d_conv",
    "mamba_expand",
    "linear_conv_kernel_dim",
    "linear_num_key_heads",
    "conv_L_cache",
    "lru_width",
    "attn_layer_period",
    "recurrent_block_type",
)


@dataclass(frozen=True)
class LanguageModel:
    """One model with what the decoder must know about it.

    Attributes:
        name: the name from params.yaml, used in messages and file names.
        module: the model in evaluation mode, without gradients.
        tokenizer: its tokenizer.
        vocab_size: tokens that exist; the logits may have more columns (rows padded for speed), which are
            never drafted.
        context_limit: most tokens (prompt and answer) that the model processes exactly.
        eos_token_ids: every id that ends an answer, ascending.
        draft_tokens: int64 [n], the tokens that the columns of its logits stand for, where its folder keeps only
            some of the head (see draft_vocabulary.py); None: column i is token i.
        folder: where it was loaded from.
        lean: a faster forward than the module's own, where there is one for its kind (see lean.py).
    """

    name: str
    module: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    vocab_size: int
    context_limit: int
    eos_token_ids: tuple[int, ...]
    draft_tokens: IntArray | None
    folder: Path
    lean: LeanForward | None = None

    @property
    def device(self) -> torch.device:
        """Where the input ids go (the first device of a model that is spread over several)."""
        return cast(torch.Tensor, self.module.get_input_embeddings().weight).device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights."""
        return self.module.dtype


def resolve_device(name: str) -> torch.device:
    """`auto` (cuda if there is one, else cpu), `cpu`, `cuda` or `cuda:<n>`; UserError for anything else or absent."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise UserError(f"device '{name}' is none of auto, cpu, cuda and cuda:<number>: change `device` in params.yaml")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"device '{name}' is not on this machine, where torch sees {torch.cuda.device_count()} CUDA devices: "
            "set `device` to auto or cpu"
        )
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto`, `float32`, `bfloat16` or `float16`; UserError for another name.

    auto: bfloat16 on CUDA and on CPUs with bf16 instructions; float32 on other CPUs, where bf16 is six times slower
        (measured).
    """
    if name in DTYPES:
        return DTYPES[name]
    if name != "auto":
        raise UserError(f"dtype '{name}' is none of auto, {', '.join(DTYPES)}: change `dtype` in params.yaml")
    if device.type == "cuda" or torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return torch.bfloat16
    return torch.float32


def resolve_drafter_dtype(name: str, device: torch.device, target: torch.dtype) -> torch.dtype:
    """As ``resolve_dtype``, with `int8`: weights and activations in int8, everything else in float32.

    auto: int8 on CPUs, where it drafts two to three times as fast (docs/decisions.md); the target's dtype elsewhere.
    """
    if name == "auto":
        return torch.int8 if device.type == "cpu" and can_quantize() else target
    if name != "int8":
        return resolve_dtype(name, device)
    if device.type != "cpu" or not can_quantize():
        raise UserError(
            f"drafter_dtype int8 is for CPUs with PyTorch's FBGEMM, not for {device} here: "
            "set `drafter_dtype` to auto in params.yaml"
        )
    return torch.int8


def refuse_recurrent(config: PretrainedConfig, name: str) -> None:
    """UserError if a model cannot take back tokens that it has processed, or is no plain causal text model.

    Recurrent, linear-attention, state-space, convolution and hybrid models are refused by family, by layer types, by
    tell-tale fields and by what transformers itself says of the class; encoder-decoders and models with a vision or
    audio part are refused too.
    """
    family = str(config.model_type)
    if config.is_encoder_decoder:
        raise UserError(
            f"model '{name}' ({family}) is an encoder-decoder; TreeGraft needs a decoder-only language model"
        )
    if getattr(config, "text_config", None) is not None or getattr(config, "vision_config", None) is not None:
        raise UserError(
            f"model '{name}' ({family}) is a multimodal model; TreeGraft decodes text only, "
            "so name the text-only checkpoint of its family"
        )
    model_class = _causal_class(config)
    layer_types = set(getattr(config, "layer_types", None) or []) | set(
        getattr(config, "layers_block_type", None) or []
    )
    reason = None
    if any(family.startswith(known) for known in RECURRENT_FAMILIES):
        reason = f"family {family}"
    elif strange := sorted(layer_types - ROLLBACK_LAYERS):
        reason = f"layers of type {', '.join(strange)}"
    elif fields := [field for field in RECURRENT_FIELDS if getattr(config, field, None)]:
        reason = f"configuration field {fields[0]}"
    elif getattr(model_class, "_is_stateful", False):
        reason = f"family {family}, stateful by its own account"
    if reason:
        raise UserError(
            f"model '{name}' keeps a recurrent state ({reason}) that cannot be rolled back when a draft is rejected: "
            "use a pure attention model"
        )
    if model_class is None:
        raise UserError(
            f"model '{name}' is of type {family}, which transformers does not know as a causal language model"
        )


def load_model(
    folder: Path,
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    device_map: str | dict[str, Any] | None = None,
) -> LanguageModel:
    """Load a transformers folder: one that `resolve_model` made or any with config.json, weights and tokenizer.

    Parameters:
        dtype: of the weights; int8 (on CPU, see ``resolve_drafter_dtype``) rounds the linear layers of a float32 model.
        device_map: None puts the whole model on `device`; `auto` or a dict spreads it over several (needs accelerate).
    Raises:
        UserError: no such folder, no config, weights or tokenizer in it, damaged files, or a model that cannot be
        rolled back.
    """
    folder = Path(folder)
    source = locate(folder)
    config = _load_config(source, name)
    refuse_recurrent(config, name)
    model_class = _causal_class(config)
    _refuse_without_positions(config, model_class, name)
    int8 = dtype == torch.int8
    module = _load_module(source, config, name, device, torch.float32 if int8 else dtype, device_map)
    try:
        with quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # as below
        raise UserError(f"model '{name}' cannot be loaded from {source}: {one_line(error)}") from error
    draft_tokens = read_draft_vocabulary(source, name, int(config.vocab_size))
    if draft_tokens is not None:
        restrict_head(module, draft_tokens)
    speed_up(module, int8)
    return LanguageModel(
        name=name,
        module=module,
        tokenizer=tokenizer,
        # Not len(tokenizer): that counts the tokens, and is too small where some ids are left out.
        vocab_size=min(max(tokenizer.get_vocab().values()) + 1, config.vocab_size),
        context_limit=context_limit(config, name),
        eos_token_ids=eos_token_ids(config, module.generation_config, tokenizer),
        draft_tokens=draft_tokens,
        folder=folder,
        lean=lean_forward(module),
    )


def load_stock(model: LanguageModel) -> PreTrainedModel:
    """The same model exactly as transformers runs it, for comparison with transformers' own decoding: once more on a
    CPU, where ``speed_up`` has changed the loaded one; elsewhere that is as it was."""
    if model.device.type != "cpu" and model.draft_tokens is None:
        return model.module
    source = locate(model.folder)
    return _load_module(source, _load_config(source, model.name), model.name, model.device, model.dtype, None)


def _load_module(
    source: Path,
    config: PretrainedConfig,
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    device_map: str | dict[str, Any] | None,
) -> PreTrainedModel:
    """The weights of a folder in transformers' own class, for inference."""
    try:
        with quiet_transformers():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                source,
                config=config,
                dtype=dtype,
                # Eager attention takes the same 4-D masks; it is for the few families without an sdpa path.
                attn_implementation="sdpa" if getattr(_causal_class(config), "_supports_sdpa", True) else "eager",
                device_map=device_map,
                output_loading_info=True,
                local_files_only=True,
                trust_remote_code=False,
            )
            module: PreTrainedModel = loaded[0]
            if device_map is None:
                cast(torch.nn.Module, module).to(device)  # moves it in place
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"model '{name}' does not fit into the memory of {device}: use a smaller model or another device"
        ) from error
    except Exception as error:  # transformers raises a dozen types for a damaged folder; all mean the same to the user
        raise UserError(f"model '{name}' cannot be loaded from {source}: {one_line(error)}") from error
    # transformers fills weights that the files lack with random numbers, and only warns.
    if lacking := sorted(loaded[1]["missing_keys"]):
        raise UserError(
            f"model '{name}': the weights in {source} lack {len(lacking)} that config.json asks for, "
            f"first {lacking[0]}; the folder mixes two models or its download was cut off"
        )
    return module.eval().requires_grad_(False)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' warnings and progress bars within the block, and put them back after it."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def context_limit(config: PretrainedConfig, name: str) -> int:
    """Most tokens that a model of this configuration processes exactly, as we call it."""
    limits = [getattr(config, "max_position_embeddings", None)]
    # A tree's 4-D mask says "all ancestors" and carries no window, so beyond the window a windowed layer would see
    # tokens that it was never trained to see. Within it nothing is cut off and the result is exact: hence the cap.
    layer_types = getattr(config, "layer_types", None) or ["sliding_attention"]  # unless told, all layers have it
    if getattr(config, "use_sliding_window", None) is not False and "sliding_attention" in layer_types:
        limits.append(getattr(config, "sliding_window", None))
    limits.append(getattr(config, "attention_chunk_size", None))
    limits.append(_short_rope_limit(config))
    known = [limit for limit in limits if limit]
    if not known:
        raise UserError(f"model '{name}' names no context length: its config.json has no max_position_embeddings")
    return int(min(known))


def _short_rope_limit(config: PretrainedConfig) -> int | None:
    """Where LongRoPE goes over to its second set of factors, None for other models.

    It takes one set for a whole forward, by its last position. A text that is processed piece by piece would mix them.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    for part in (rope, *(inner for inner in rope.values() if isinstance(inner, dict))):
        if part.get("rope_type") == "longrope":
            original = part.get("original_max_position_embeddings")
            return original or getattr(config, "original_max_position_embeddings", None)
    return None


def eos_token_ids(
    config: PretrainedConfig, generation_config: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase
) -> tuple[int, ...]:
    """The ids that end an answer: those of the generation config, the config and the tokenizer together, ascending.

    Any one of the three may lack an id: chat checkpoints often name the end of a turn in one place and of a text in
    another.
    """
    ids: set[int] = set()
    for value in (
        getattr(generation_config, "eos_token_id", None),
        getattr(config, "eos_token_id", None),
        tokenizer.eos_token_id,
    ):
        if value is not None:
            ids.update(value if isinstance(value, Iterable) else [value])
    return tuple(sorted(int(token) for token in ids))


def _causal_class(config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """The class transformers would build, or None for a family it does not know as a causal language model."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    found = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return found[0] if isinstance(found, (list, tuple)) else found


def _refuse_without_positions(config: PretrainedConfig, model_class: type[PreTrainedModel] | None, name: str) -> None:
    """UserError for models that tell tokens apart by their slot (ALiBi, GPT-Neo's window) and not by position ids:
    they cannot express that siblings share a position."""
    if model_class is None:
        return
    takes = "position_ids" in inspect.signature(model_class.forward).parameters
    if not takes or getattr(config, "alibi", False) or "local" in (getattr(config, "attention_layers", None) or ()):
        raise UserError(
            f"model '{name}' ({model_class.__name__}) does not go by position ids alone, so a draft tree cannot be put "
            "to it: use a model with rotary or learned positions"
        )


def _load_config(folder: Path, name: str) -> PretrainedConfig:
    """config.json of a folder, as transformers reads it."""
    file = folder / "config.json"
    if not file.is_file():
        what = "has no config.json" if folder.is_dir() else "is not a folder"
        raise UserError(
            f"model '{name}' cannot be loaded: {folder} {what}; run `pipeline fetch` or correct the path in params.yaml"
        )
    try:
        raw = json.loads(file.read_text())
        with quiet_transformers():
            config: PretrainedConfig = AutoConfig.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
            return config
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"model '{name}' cannot be loaded: {file} is not valid JSON ({one_line(error)})") from error
    except Exception as error:
        family = raw.get("model_type") if isinstance(raw, dict) else None
        raise UserError(f"model '{name}' of type {family} cannot be loaded: {one_line(error)}") from error
