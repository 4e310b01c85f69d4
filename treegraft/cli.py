"""The command ``treegraft``: text from a trained scheduler and its models, on the terminal, as it comes.

It imports nothing heavy before it knows what to do, so that ``--help`` and mistakes answer at once.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from treegraft.errors import UserError

if TYPE_CHECKING:
    from treegraft.api import TreeGraft
    from treegraft.metrics import DecodingMetrics
    from treegraft.tree import IntArray

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
SAMPLING = ("temperature", "top_k", "top_p", "min_p")
LOADING = ("device", "device_map", "dtype", "drafter_dtype", "threads")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line ``arguments`` (default: those of the process) and return the exit code.

    0: done. 2: the user can mend it; standard error has one sentence. 130: interrupted. Anything else that goes wrong
    is a fault of this program and keeps its traceback.
    """
    options = _parser().parse_args(arguments)
    try:
        _generate(options)
    except UserError as error:
        sys.stderr.write(f"treegraft: {' '.join(str(error).split())}\n")
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0


def _generate(options: argparse.Namespace) -> None:
    settings = _settings(options)
    # Libraries neither phone home nor chat: the terminal is for the text.
    for variable, value in {"HF_HUB_DISABLE_TELEMETRY": "1", "TRANSFORMERS_VERBOSITY": "error"}.items():
        os.environ.setdefault(variable, value)
    from treegraft.api import TreeGraft

    loading = {name: getattr(options, name) for name in LOADING if getattr(options, name) is not None}
    graft = TreeGraft.from_pretrained(options.scheduler, **loading)
    # A turn of a chat may end at an id that the model's generation config forgets.
    settings["eos_token_id"] = list(graft.decoder.target.eos_token_ids)
    if options.chat:
        _chat(graft, settings, options.seed)
    else:
        _answer(graft, _encoded(graft, options.prompt, options.raw), settings, options.seed)


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """The generation settings of the command line."""
    given = {name: getattr(options, name) for name in SAMPLING if getattr(options, name) is not None}
    if given and not given.get("temperature"):
        if lonely := [name for name in given if name != "temperature"]:
            flag = lonely[0].replace("_", "-")
            raise UserError(f"--{flag} shapes sampling, which needs --temperature above 0.")
        given = {}
    if options.raw and options.chat:
        raise UserError("--raw goes with --prompt; a chat needs the chat template.")
    return given | {"do_sample": bool(given), "max_new_tokens": options.max_new_tokens}


def _encoded(graft: "TreeGraft", prompt: str, raw: bool) -> "IntArray":
    import numpy as np

    from treegraft.pair import encode_turns

    if raw:
        return np.array(graft.tokenizer(prompt).input_ids, np.int64)
    return encode_turns(graft.decoder.target, [prompt], [])


def _chat(graft: "TreeGraft", settings: dict[str, Any], seed: int | None) -> None:
    """Turn by turn until the end of the input; an interrupt ends an answer, and between answers the session."""
    from treegraft.pair import encode_turns

    turns: list[str] = []
    answers: list[str] = []
    while True:
        try:
            turn = input("> ").strip()
        except EOFError:
            sys.stdout.write("\n")
            return
        if turn:
            turns.append(turn)
            tokens = encode_turns(graft.decoder.target, turns, answers)
            answers.append(_answer(graft, tokens, settings, seed, interruptible=True))


def _answer(
    graft: "TreeGraft", tokens: "IntArray", settings: dict[str, Any], seed: int | None, interruptible: bool = False
) -> str:
    """Print the answer to a prompt (int64 [n]) as it comes, then a summary; returns its text."""
    import torch
    from transformers import TextStreamer

    class Printer(TextStreamer):
        """Writes text as soon as its characters are whole, and keeps it."""

        text = ""

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            self.text += text
            sys.stdout.write(text + "\n" * stream_end)
            sys.stdout.flush()

    printer = Printer(graft.tokenizer, skip_prompt=True, skip_special_tokens=True)
    try:
        graft.generate(torch.from_numpy(tokens)[None], seed=seed, streamer=printer, **settings)
    except KeyboardInterrupt:
        printer.end()
        if not interruptible:
            raise
        sys.stderr.write("(interrupted)\n")
    else:
        if graft.last_metrics is not None:
            sys.stderr.write(_summary(graft, graft.last_metrics))
    return printer.text


def _summary(graft: "TreeGraft", metrics: "DecodingMetrics") -> str:
    """One line; the time is that of the whole request, the prompt's share included."""
    strong = sum(metrics.calls[graft.config.drafters.index(name)] for name in graft.config.model_drafters)
    return (
        f"{metrics.tokens} tokens, {metrics.tokens / metrics.seconds:.1f} tokens/s, "
        f"{metrics.tokens / metrics.steps:.2f} tokens a step, {strong / metrics.steps:.2f} strong calls a step\n"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="treegraft", description="Generate text with a target, its drafters and the scheduler trained for them."
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    command = commands.add_parser(
        "generate",
        help="answer a prompt, or chat",
        description="Write the target's answer as it comes, and a line about its speed on standard error.",
    )
    command.add_argument(
        "scheduler", help="a scheduler's folder, or a pair such as smollm2-135m (models/schedulers/<pair>)"
    )
    what = command.add_mutually_exclusive_group(required=True)
    what.add_argument("--prompt", metavar="TEXT", help="answer this and end")
    what.add_argument("--chat", action="store_true", help="read turns from the terminal; Ctrl-C ends an answer")
    command.add_argument("--raw", action="store_true", help="give the prompt as it is, without the chat template")
    command.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="longest answer (256)")
    command.add_argument("--temperature", type=float, metavar="T", help="draw tokens; without it greedy decoding")
    command.add_argument("--top-k", type=int, metavar="K", help="draw from the K likeliest tokens (50; 0: all)")
    command.add_argument("--top-p", type=float, metavar="P", help="draw from the likeliest tokens of this mass (1)")
    command.add_argument("--min-p", type=float, metavar="P", help="least chance in parts of the likeliest token's (0)")
    command.add_argument("--seed", type=int, metavar="S", help="the same seed draws the same text")
    trained = command.add_argument_group("what the scheduler was trained with, where params.yaml does not say auto")
    trained.add_argument("--device", help="auto, cpu, cuda or cuda:1")
    trained.add_argument("--device-map", choices=["auto"], help="spread the target over all GPUs")
    trained.add_argument("--dtype", help="of the target: auto, float32, bfloat16 or float16")
    trained.add_argument("--drafter-dtype", help="auto, int8, float32, bfloat16 or float16")
    trained.add_argument("--threads", type=int, metavar="N", help="CPU threads")
    return parser
