"""The card of a scheduler's checkpoint, for people."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treegraft.scheduling.checkpoint import SchedulerConfig


def card(config: "SchedulerConfig") -> str:
    """README.md of a checkpoint: what it is, was trained on, is worth, cannot do, and how to use it."""
    data = config.provenance.get("data", {})
    trained = "\n".join(f"- {name.replace('_', ' ')}: {_plain_words(value)}" for name, value in sorted(data.items()))
    sizes = _plain_words([len(config.feature_names), *config.hidden, len(config.drafters) - 1])
    actions = "\n".join(f"- action {action}: `{name}`" for action, name in enumerate(config.drafters))
    return f"""# Scheduler for `{config.pair}`

A TreeGraft scheduler: layer by layer it decides which drafter expands the draft tree. A small network
(layers of {sizes}) predicts how many tokens each dearer drafter is worth over the light one; the largest
prediction above 0 wins. A drafter whose pass over the prompt would cost more than its calls can save on the tokens
that a request may emit is not called in that request; on a token they save {_savings(config)}.

{actions}

Depth {config.depth}, width {config.width}, look-back {config.look_back}; best fixed schedule {list(config.best_fixed)}.

## Trained on

{trained or "- not recorded"}

## Replayed speed

Modelled from tables of outcomes and measured latencies, not clocked end to end; for that see the pair's report.

{_speed_table(config.replay)}
Rate by which the verified size is chosen, constant at run time: {config.rate_tokens_per_ms:.6g} tokens/ms.

## Limits

- Made for these models, this depth and width, and the machine whose latencies `cost_model` in config.json holds: on
  other hardware the best action differs, so run the pipeline there. Other tokenizers, drafters or depths are refused.
- It changes speed only. The text is the target's own whatever the scheduler decides.
- Text unlike the prompts above may be scheduled badly; the report shows the speed by kind of prompt.

## Use

`treegraft generate {config.pair} --chat`, or `TreeGraft.from_pretrained("{config.pair}")` from `treegraft.api`, with
the models beside it. The network alone:

```python
from pathlib import Path
from treegraft.scheduling.checkpoint import load_scheduler

network, config = load_scheduler(Path("models/schedulers/{config.pair}"))
margins = network.margins(features)  # features [{len(config.feature_names)}], in the order of config.feature_names
```

Files: `model.safetensors` (weights), `config.json` (all else, with provenance). This card is written from config.json.
`pipeline onnx {config.pair}` adds `model.onnx`: the same network for other runtimes, features in, margins out.
"""


def _savings(config: "SchedulerConfig") -> str:
    pairs = zip(config.saving.prompt_tokens, config.saving.ms, strict=True)
    return ", ".join(f"{ms:.4g} ms after a prompt of {tokens} tokens" for tokens, ms in pairs)


def _speed_table(replay: dict[str, dict[str, float | None]]) -> str:
    """Markdown table of tokens per ms and of the speed-up over plain decoding."""
    if not replay:
        return "Not recorded.\n"
    splits = sorted(replay, reverse=True)  # validation before test
    lines = [
        "| method | " + " | ".join(f"{split}, tokens/ms | over plain" for split in splits) + " |",
        "|---" * (1 + 2 * len(splits)) + "|",
    ]
    rank = {name: index for index, name in enumerate(("plain", "ngram", "strong", "fixed", "student"))}
    methods = sorted({name for rates in replay.values() for name in rates}, key=lambda name: (rank.get(name, 9), name))
    for method in methods:
        cells = [method]
        for split in splits:
            rate, plain = replay[split].get(method), replay[split].get("plain")
            cells.append("-" if rate is None else f"{rate:.5f}")
            cells.append("-" if rate is None or not plain else f"{rate / plain:.3f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _plain_words(value: Any) -> str:
    """A JSON value as a reader wants it: lists with commas, the rest as it is."""
    return ", ".join(str(item) for item in value) if isinstance(value, list) else str(value)
