"""The command ``pipeline``: the one place that touches arguments and exit codes.

It imports nothing heavy before it knows the stage, so that ``--help`` and mistakes answer at once.
"""

import argparse
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.files import only_one
from pipeline.stages import STAGES, Stage, write_sections
from treegraft.errors import UserError

if TYPE_CHECKING:
    from pipeline.params import PairConfig

EXIT_SLOWER = 1
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line ``arguments`` (default: those of the process) and return the exit code.

    0: done. 1: `pipeline compare --fail-if-slower` found TreeGraft slower. 2: the user can mend it; standard error has
    one sentence. 130: interrupted. `pipeline all` hands on the exit code of the stage that failed. Anything else that
    goes wrong is a fault of this program and keeps its traceback.
    """
    options = _parser().parse_args(arguments)
    try:
        if options.stage == "validate":
            return _validate(options.folder)
        if options.stage == "tune":
            return _tune(options.pair, options.set, options.trials, options.workers)
        if options.stage == "generalize":
            return _generalize(options.name, options.pairs, options.held_out, options.set)
        if options.stage == "compare":
            return _compare(options.earlier, options.later, options.fail_if_slower)
        if options.stage == "onnx":
            return _onnx(options.pair)
        if options.stage == "all":
            return _run_all(options.pair, options.set)
        return _run_stage(
            STAGES[options.stage],
            options.pair,
            options.set,
            rebuild=getattr(options, "rebuild", False),
            plan=getattr(options, "plan", False),
        )
    except UserError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS) and error.filename:
            return _fail(f"{error.filename} cannot be written or read ({error.strerror}): give this user the right to.")
        if not _disk_is_full(error):
            raise
        return _fail("The disk is full; earlier results are whole: make room and run the same command again.")


def _run_stage(stage: Stage, pair: str, overrides: Sequence[str], *, rebuild: bool, plan: bool) -> int:
    from pipeline.provenance import changed_code, code_changed, source_digests

    config = _load(pair, overrides)
    code = source_digests()
    if plan:
        from pipeline.label_plan import run as print_plan

        print_plan(config)
        return 0
    # Workers of one labelling come in company; whoever starts them starts rank 0 once.
    lock = config.paths.scratch(stage.name).with_suffix(".lock")
    leads = os.environ.get("RANK", "0") == "0"
    with only_one(lock, f"pipeline {stage.name} {pair}") if leads else nullcontext():
        if rebuild:
            from pipeline.draft import rebuild as rebuild_drafter

            rebuild_drafter(config)
        else:
            stage.run()(config)
            write_sections(config, stage.sections)
    if changed := changed_code(code):
        print(f"pipeline: {code_changed(stage.name, pair, changed)}", file=sys.stderr)
    return 0


def _load(pair: str, overrides: Sequence[str]) -> "PairConfig":
    """The pair's configuration, and the environment as it wants it."""
    from pipeline.params_file import load_pair

    config = load_pair(pair, overrides)
    # Before torch is imported, because its thread pools are sized then.
    if config.threads != "auto":
        os.environ["OMP_NUM_THREADS"] = str(config.threads)
    # Libraries neither phone home nor chat: a stage's own lines stay readable.
    for variable, value in {"HF_HUB_DISABLE_TELEMETRY": "1", "TRANSFORMERS_VERBOSITY": "error"}.items():
        os.environ.setdefault(variable, value)
    return config


def _tune(pair: str, overrides: Sequence[str], trials: int | None, workers: int | None) -> int:
    own = {"trials": trials, "workers": workers}
    config = _load(pair, [*overrides, *(f"tune.{key}={value}" for key, value in own.items() if value is not None)])
    from pipeline.tune import run

    run(config)
    return 0


def _onnx(pair: str) -> int:
    config = _load(pair, ())
    from pipeline.onnx_export import run

    run(config)
    return 0


def _generalize(name: str, pairs: Sequence[str], held_out: Sequence[str], overrides: Sequence[str]) -> int:
    trained, tested = ([_load(pair, overrides) for pair in group] for group in (pairs, held_out))
    from pipeline.generalize import run

    run(name, trained, tested)
    return 0


def _run_all(pair: str, overrides: Sequence[str]) -> int:
    """Every stage in its own process, so that the memory of one is free for the next."""
    from pipeline.params_file import load_pair

    load_pair(pair, overrides)  # a mistake shows before the first stage starts
    settings = [argument for override in overrides for argument in ("--set", override)]
    for number, name in enumerate(STAGES, start=1):
        print(f"[{number}/{len(STAGES)}] {name} {pair}", file=sys.stderr, flush=True)
        code = _call([sys.executable, "-m", "pipeline", name, pair, *settings])
        if code != 0:
            return code
    return 0


def _validate(folder: Path) -> int:
    """Every fault of a trace folder on standard output, one a line, or that there is none."""
    from treegraft.values.validation import validate_traces

    if not folder.is_dir():
        raise UserError(f"{folder} is no folder.")
    faults, summary = validate_traces(folder)
    _print("\n".join(faults or [summary]))
    return EXIT_USER_ERROR if faults else 0


def _compare(earlier: Path, later: Path, fail_if_slower: bool) -> int:
    """What changed between two reports on standard output; with ``fail_if_slower`` the verdict as exit code."""
    from pipeline.compare import compare_reports, render
    from pipeline.report_index import load_report

    comparison = compare_reports(load_report(earlier), load_report(later))
    _print(render(comparison))
    if not fail_if_slower:
        return 0
    if comparison.undecidable:
        raise UserError(f"Whether TreeGraft got slower cannot be told: {comparison.undecidable}.")
    return EXIT_SLOWER if comparison.verdict == "slower" else 0


def _print(text: str) -> None:
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # `| head` has read enough; nothing is left to say when Python closes the stream.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _call(command: Sequence[str]) -> int:
    """Run ``command`` to its end; a death by signal n is 128 + n, as shells have it."""
    with subprocess.Popen(command) as process:
        # Who ends this command means the stage as well: left alone, it would go on beside the next one.
        before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        try:
            code = process.wait()
        except KeyboardInterrupt:
            # The terminal has sent the interrupt to the stage too: let it end in order.
            process.wait()
            raise
        finally:
            signal.signal(signal.SIGTERM, before)
    return code if code >= 0 else 128 - code


def _fail(sentence: str) -> int:
    print(f"pipeline: {' '.join(sentence.split())}", file=sys.stderr)
    return EXIT_USER_ERROR


def _disk_is_full(error: BaseException) -> bool:
    """Whether ``error`` or a cause of it is a full disk; some libraries wrap the system's error as text only."""
    return any(
        (isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT))
        or "No space left on device" in str(cause)
        for cause in _causes(error)
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pipeline",
        description="Train a scheduler for a model pair of params.yaml and report how fast it decodes. "
        "Run it in the repository's root folder.",
    )
    commands = parser.add_subparsers(dest="stage", metavar="STAGE", required=True)
    for stage in STAGES.values():
        command = commands.add_parser(
            stage.name,
            help=stage.summary,
            description=f"{stage.summary[0].upper()}{stage.summary[1:]}.",
            epilog=_files(stage),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        _add_common(command)
        if stage.name == "draft":
            command.add_argument(
                "--rebuild",
                action="store_true",
                help="train the distilled drafter's layers anew (long) and overwrite its file in data/drafters/",
            )
        if stage.name == "label":
            command.add_argument(
                "--plan", action="store_true", help="only say what would be done and about what it would cost"
            )
    everything = commands.add_parser(
        "all",
        help="all stages in this order, each in its own process",
        description=f"Run {', '.join(STAGES)}; stops at the first that fails, with its exit code.",
    )
    _add_common(everything)
    tune = commands.add_parser(
        "tune",
        help="search better settings of stage distill; no part of all",
        description="Search settings of stage distill by the replayed speed on the validation prompts and write the "
        "best into params.yaml if they beat the present ones. Goes on with what earlier or other such commands did.",
        epilog="reads:\n  data/traces/<pair>/\n  params.yaml: decoding, distill, seed, tune\n"
        "writes:\n  .treegraft/<pair>/tune/\n  reports/<pair>/tune.json\n  reports/<pair>/tune.html\n  params.yaml",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_common(tune)
    tune.add_argument("--trials", type=int, metavar="N", help="finished trials in all (default: tune.trials)")
    tune.add_argument("--workers", type=int, metavar="K", help="processes that work at it (default: tune.workers)")
    onnx = commands.add_parser(
        "onnx",
        help="write a pair's scheduler as an ONNX file; no part of all",
        description="Write the network of a pair's scheduler as ONNX, features in and margins out, and keep the "
        "file only if it gives the margins that the scheduler gives. Needs onnx: pip install -e '.[onnx]'.",
        epilog="reads:\n  models/schedulers/<pair>/\nwrites:\n  models/schedulers/<pair>/model.onnx",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    onnx.add_argument("pair", help="a pair of params.yaml, such as smollm2-135m")
    generalize = commands.add_parser(
        "generalize",
        help="train one scheduler for several pairs and machines and test it on new ones; no part of all",
        description="Train one student on the traces of several pairs, under the costs that were measured and under "
        "those of imagined hardware, and compare its replayed speed on test prompts with that of students made for "
        "one pair and one machine. Held-out pairs and regimes are only tested on. Goes on where a killed run ended.",
        epilog="reads:\n  data/traces/<pair>/ of every pair\n"
        "  params.yaml: decoding of every pair; distill, traces, seed of the first\n"
        "writes:\n  .treegraft/<name>/generalize/\n  reports/<name>/generalize.json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    generalize.add_argument("name", help="of the report")
    generalize.add_argument("--pairs", nargs="+", required=True, metavar="PAIR", help="pairs to train on")
    generalize.add_argument("--held-out", nargs="+", default=[], metavar="PAIR", help="pairs to test on alone")
    _add_set(generalize)
    validate = commands.add_parser(
        "validate",
        help="check a trace folder and list all its faults",
        description="Check both tables of a trace folder, such as data/traces/<pair>: columns, types, values, keys, "
        "splits and bytes. Lists every fault with its place; exit code 2 if there is one.",
    )
    validate.add_argument("folder", type=Path, help="a folder that stage traces wrote, or a copy of one")
    compare = commands.add_parser(
        "compare",
        help="say what changed between two reports beyond noise",
        description="Hold a report.json against an earlier one: what differs in hardware, settings and prompts, then "
        "every benchmark and method with what changed beyond noise.",
    )
    compare.add_argument("earlier", type=Path, help="the report.json to hold against")
    compare.add_argument("later", type=Path, help="the new report.json")
    compare.add_argument(
        "--fail-if-slower",
        action="store_true",
        help="exit code 1 if TreeGraft's speed-up over plain decoding fell beyond noise, 2 if that cannot be told",
    )
    return parser


def _add_common(command: argparse.ArgumentParser) -> None:
    command.add_argument("pair", help="a pair of params.yaml, such as smollm2-135m")
    _add_set(command)


def _add_set(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a parameter of the pair, such as distill.epochs=10; may be given several times",
    )


def _files(stage: Stage) -> str:
    """What ``stage`` reads and writes, for its help."""
    lines = ["reads:", *(f"  {path}" for path in stage.reads)]
    lines += [f"  params.yaml: {', '.join(stage.sections)}"] if stage.name != "fetch" else []
    return "\n".join([*lines, "writes:", *(f"  {path}" for path in stage.writes)])
