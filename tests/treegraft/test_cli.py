"""The command ``treegraft``: text on standard output, all else on standard error, honest exit codes."""

import builtins
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TextStreamer

from tests.treegraft.tiny_scheduler import PAIR, make_scheduler
from treegraft import cli
from treegraft.api import TreeGraft


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    make_scheduler(folder)
    return folder


@pytest.fixture(autouse=True)
def _in_the_folder(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    load = TreeGraft.from_pretrained
    # The tests' texts are float32's, also on a machine whose automatic choice is another.
    plain = {"device": "cpu", "dtype": "float32"}
    monkeypatch.setattr(TreeGraft, "from_pretrained", lambda name, **given: load(name, **(plain | given)))


@pytest.fixture
def type_in(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Lines that the user of a chat types; an exception is raised in its place; then the input ends."""

    def put(*lines: str | BaseException) -> None:
        waiting: Iterator[str | BaseException] = iter([*lines, EOFError()])

        def typed(prompt: str) -> str:
            line = next(waiting)
            if isinstance(line, BaseException):
                raise line
            return line

        monkeypatch.setattr(builtins, "input", typed)

    return put


def answer(prompt: str, **settings: Any) -> str:
    graft = TreeGraft.from_pretrained(PAIR)
    tokens = torch.tensor([graft.tokenizer(prompt).input_ids])
    found: Any = graft.generate(tokens, **settings)
    return str(graft.tokenizer.decode(found[0, tokens.shape[1] :], skip_special_tokens=True))


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys\n"
        "from treegraft.cli import main\n"
        "try:\n"
        "    main(sys.argv[1:])\n"
        "except SystemExit as done:\n"
        "    assert done.code == 0\n"
        "assert not {'torch', 'transformers', 'numpy', 'pydantic'} & set(sys.modules)\n"
    )
    for arguments in (["--help"], ["generate", "--help"]):
        done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True)
        assert "usage: treegraft" in done.stdout


def test_a_prompt_is_answered_with_the_templates_tokens_or_raw(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", PAIR, "--prompt", "w3 w7 w5", "--max-new-tokens", "12"]) == 0
    out, err = capsys.readouterr()
    assert out == answer("<s> w3 w7 w5", max_new_tokens=12) + "\n"
    lines = err.splitlines()
    assert len(lines) == 1
    for part in ("12 tokens", "tokens/s", "tokens a step", "strong calls a step"):
        assert part in lines[0]
    assert cli.main(["generate", f"models/schedulers/{PAIR}", "--raw", "--prompt", "w3 w7", "--max-new-tokens=9"]) == 0
    assert capsys.readouterr().out == answer("w3 w7", max_new_tokens=9) + "\n"


def test_sampling_settings_reach_the_decoder(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--raw", "--prompt", "w3 w7", "--max-new-tokens", "9", "--seed", "4"]
    sampling = ["--temperature", "0.9", "--top-k", "20", "--top-p", "0.9", "--min-p", "0.01"]
    assert cli.main(["generate", PAIR, *arguments, *sampling]) == 0
    settings = {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.01}
    expected = answer("w3 w7", max_new_tokens=9, do_sample=True, seed=4, **settings)
    assert capsys.readouterr().out == expected + "\n"


def test_models_are_loaded_as_the_command_line_says(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    load, loaded = TreeGraft.from_pretrained, []

    def noted(name: str, **given: Any) -> TreeGraft:
        loaded.append(load(name, **given))
        return loaded[-1]

    monkeypatch.setattr(TreeGraft, "from_pretrained", noted)
    before = torch.get_num_threads()
    arguments = ["generate", PAIR, "--prompt", "w3 w7", "--max-new-tokens", "5"]
    try:
        assert cli.main([*arguments, "--dtype", "bfloat16", "--drafter-dtype", "float32", "--threads", "1"]) == 0
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
    drafter: Any = loaded[0].decoder.drafters[1]
    assert (loaded[0].model.dtype, drafter.runner.dtype) == (torch.bfloat16, torch.float32)
    capsys.readouterr()
    assert cli.main([*arguments, "--device-map", "auto", "--device", "cpu"]) == 0
    assert capsys.readouterr().out == answer("<s> w3 w7", max_new_tokens=5) + "\n"
    for option, wrong in (("--device", "abacus"), ("--dtype", "float3"), ("--threads", "0")):
        assert cli.main([*arguments, option, wrong]) == 2
        assert wrong in capsys.readouterr().err


def test_a_chat_goes_on_from_its_own_answers(type_in: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    type_in("w3 w7", "", "w9")
    assert cli.main(["generate", PAIR, "--chat", "--max-new-tokens", "5"]) == 0
    first = answer("<s> w3 w7", max_new_tokens=5)
    second = answer(f"<s> w3 w7 {first} w9", max_new_tokens=5)
    assert capsys.readouterr().out == f"{first}\n{second}\n\n"


def test_ctrl_c_ends_an_answer_and_then_the_session(
    type_in: Callable[..., None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    put, pieces = TextStreamer.put, 0

    def interrupted(self: TextStreamer, value: torch.Tensor) -> None:
        """Ctrl-C at the second piece of the first answer; the prompt is a piece too."""
        nonlocal pieces
        put(self, value)
        pieces += 1
        if pieces == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(TextStreamer, "put", interrupted)
    type_in("w3 w7", "w9", KeyboardInterrupt())
    assert cli.main(["generate", PAIR, "--chat", "--max-new-tokens", "20"]) == 130
    out, err = capsys.readouterr()
    first, second = out.splitlines()
    assert answer("<s> w3 w7", max_new_tokens=20).startswith(first)
    assert len(first.split()) < 20
    assert second == answer(f"<s> w3 w7 {first} w9", max_new_tokens=20)
    assert [line.split()[0] for line in err.splitlines()] == ["(interrupted)", str(len(second.split()))]


def test_ctrl_c_during_a_single_answer_is_exit_code_130(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: TreeGraft, *args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(TreeGraft, "generate", interrupted)
    assert cli.main(["generate", PAIR, "--prompt", "w3"]) == 130
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["nowhere", "--prompt", "w3"], "there is no scheduler in nowhere"),
        ([PAIR, "--prompt", "w3", "--top-p", "0.9"], "--top-p shapes sampling, which needs --temperature above 0"),
        ([PAIR, "--prompt", "w3", "--temperature", "-1"], "temperature is -1.0"),
        ([PAIR, "--prompt", "w3", "--max-new-tokens", "0"], "max_new_tokens"),
        ([PAIR, "--chat", "--raw"], "--raw goes with --prompt"),
        ([PAIR, "--raw", "--prompt", ""], "the prompt is empty"),
    ],
)
def test_mistakes_are_one_sentence_and_exit_code_2(
    arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["generate", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert part in err
    assert err.startswith("treegraft: ")
    assert err.count("\n") == 1
