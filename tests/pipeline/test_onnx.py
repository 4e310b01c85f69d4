"""Command onnx: the file says what the scheduler says, is refused where it does not, and outlives no scheduler."""

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from pipeline import cli
from tests.treegraft.scheduling.test_checkpoint import make
from tests.treegraft.scheduling.test_network import random_network
from treegraft.scheduling.checkpoint import SchedulerConfig, save_scheduler
from treegraft.scheduling.features import feature_names
from treegraft.scheduling.network import MarginNetwork

ROOT = Path(__file__).parents[2]
PAIR = "smollm2-135m"
FOLDER = Path("models/schedulers") / PAIR
FILE = FOLDER / "model.onnx"


@pytest.fixture(autouse=True)
def _in_a_folder_with_params(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(ROOT / "params.yaml", tmp_path)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def onnx() -> Any:
    """The package, where it is installed."""
    return pytest.importorskip("onnx")


def save(network: MarginNetwork, drafters: tuple[str, ...] = ("ngram", "strong")) -> SchedulerConfig:
    """A checkpoint of ``PAIR`` around ``network``."""
    _, config = make(
        pair=PAIR,
        hidden=network.hidden,
        drafters=drafters,
        means=tuple(network.means.tolist()),
        scales=tuple(network.scales.tolist()),
        tokenizer_hashes=dict.fromkeys(("target", *drafters[1:]), "a" * 64),
    )
    config = replace(config, feature_names=tuple(feature_names(config.depth, len(drafters))))
    return save_scheduler(FOLDER, network, config)


def sized(hidden: tuple[int, ...], drafters: int = 2, seed: int = 0) -> MarginNetwork:
    return random_network((len(feature_names(2, drafters)), *hidden, drafters - 1), seed)


def exact_margins(network: MarginNetwork, features: np.ndarray) -> np.ndarray:
    """The perceptron in float64, as its definition has it."""
    values = (features - network.means.astype(np.float64)) / network.scales
    for layer, (weight, bias) in enumerate(zip(network.weights, network.biases, strict=True)):
        values = (np.maximum(values, 0) if layer else values) @ weight.astype(np.float64) + bias
    return values


def evaluated(features: np.ndarray) -> np.ndarray:
    from onnx.reference import ReferenceEvaluator

    (margins,) = ReferenceEvaluator(str(FILE)).run(None, {"features": features})
    return np.asarray(margins)


def wild(network: MarginNetwork) -> MarginNetwork:
    """``network`` with features of very different sizes, some of which hardly vary beside their mean."""
    random = np.random.default_rng(1)
    powers = random.uniform(-3, 3, (2, network.features))
    return MarginNetwork(network.weights, network.biases, network.means * 10 ** powers[0], 10 ** powers[1])


# --- what it says ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafters", [("ngram", "strong"), ("ngram", "middle", "strong")])
@pytest.mark.parametrize("hidden", [(), (6,), (64, 32)])
def test_the_file_computes_the_standardised_perceptron(
    onnx: Any, hidden: tuple[int, ...], drafters: tuple[str, ...]
) -> None:
    network = sized(hidden, len(drafters))
    save(network, drafters)
    assert cli.main(["onnx", PAIR]) == 0
    for rows in (1, 40):
        drawn = np.random.default_rng(5).normal(size=(rows, network.features))
        features = (network.means + network.scales * drawn).astype(np.float32)
        margins = evaluated(features)
        assert margins.dtype == np.float32
        assert margins.shape == (rows, len(drafters) - 1)
        np.testing.assert_allclose(margins, exact_margins(network, features), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(margins, network.margins(features), rtol=1e-5, atol=1e-5)


def test_its_constants_are_the_checkpoints_and_its_metadata_says_whose_it_is(onnx: Any) -> None:
    network = sized((6, 3))
    config = save(network)
    assert cli.main(["onnx", PAIR]) == 0
    made = onnx.load(FILE)
    constants = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in made.graph.initializer}
    expected = safetensors.numpy.load_file(FOLDER / "model.safetensors")
    expected |= {"means": network.means, "scales": network.scales}
    assert constants.keys() == expected.keys()
    assert all(np.array_equal(constants[name], expected[name]) for name in expected)
    metadata = {entry.key: entry.value for entry in made.metadata_props}
    stored = json.loads((FOLDER / "config.json").read_text())
    assert metadata["pair"] == PAIR
    assert metadata["weights_sha256"] == stored["weights_sha256"] == config.weights_sha256
    for name in ("feature_names", "drafters"):
        assert json.loads(metadata[name]) == stored[name]
    for value, name, width in (
        (made.graph.input[0], "features", network.features),
        (made.graph.output[0], "margins", network.outputs),
    ):
        shape = value.type.tensor_type.shape.dim
        assert (value.name, shape[0].dim_param, shape[1].dim_value) == (name, "n", width)
        assert value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT
    assert (len(made.graph.input), len(made.graph.output)) == (1, 1)


def test_equal_schedulers_give_equal_bytes_and_others_do_not(onnx: Any) -> None:
    written = []
    for seed in (0, 0, 1):
        save(sized((6, 3), seed=seed))
        FILE.unlink(missing_ok=True)
        assert cli.main(["onnx", PAIR]) == 0
        written.append(FILE.read_bytes())
    assert written[0] == written[1] != written[2]


def test_a_feature_that_hardly_varies_is_no_reason_to_refuse(onnx: Any) -> None:
    for seed in range(5):
        save(wild(sized((64, 32), seed=seed)))
        assert cli.main(["onnx", PAIR]) == 0


# --- what is refused -------------------------------------------------------------------------------------------------


def scaled(name: str) -> Callable[[Any, Any], None]:
    """Make one constant wrong by a ten-thousandth."""

    def spoil(onnx: Any, made: Any) -> None:
        (tensor,) = [tensor for tensor in made.graph.initializer if tensor.name == name]
        tensor.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor) * np.float32(1.0001), name))

    return spoil


def without_relu(onnx: Any, made: Any) -> None:
    next(node for node in made.graph.node if node.op_type == "Relu").op_type = "Identity"


def not_a_number(onnx: Any, made: Any) -> None:
    tensor = made.graph.initializer[-1]
    tensor.CopyFrom(onnx.numpy_helper.from_array(np.array([np.nan], np.float32), tensor.name))


def unknown_operator(onnx: Any, made: Any) -> None:
    made.graph.node[0].op_type = "Substract"


def one_row_for_all(onnx: Any, made: Any) -> None:
    made.graph.node[-1].output[0] = "each"
    made.graph.node.append(onnx.helper.make_node("ReduceMax", ["each"], ["margins"], axes=[0], keepdims=1))


CONSTANTS = [f"layers.{layer}.{part}" for layer in range(3) for part in ("weight", "bias")]


@pytest.mark.parametrize(
    ("spoil", "part"),
    [
        *((scaled(name), "from the scheduler's own") for name in ("means", "scales", *CONSTANTS)),
        (without_relu, "from the scheduler's own"),
        (not_a_number, "margins up to nan tokens"),
        (unknown_operator, "is not valid"),
        (one_row_for_all, "float32 [1, 1] instead of float32 [512, 1]"),
    ],
)
def test_a_file_that_says_something_else_is_not_kept(
    onnx: Any,
    spoil: Callable[[Any, Any], None],
    part: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from pipeline import onnx_export

    save(sized((64, 32)))
    before = {path.name: path.read_bytes() for path in FOLDER.iterdir()}
    real = onnx_export.model

    def spoilt(network: MarginNetwork, scheduler: SchedulerConfig) -> Any:
        made = real(network, scheduler)
        spoil(onnx, made)
        return made

    monkeypatch.setattr(onnx_export, "model", spoilt)
    assert cli.main(["onnx", PAIR]) == 2
    message = capsys.readouterr().err
    assert part in message
    assert "not kept" in message
    assert message.count("\n") == 1
    assert {path.name: path.read_bytes() for path in FOLDER.iterdir()} == before
    # An earlier file stays, too.
    FILE.write_bytes(b"earlier")
    assert cli.main(["onnx", PAIR]) == 2
    assert {path.name: path.read_bytes() for path in FOLDER.iterdir()} == before | {FILE.name: b"earlier"}


def test_a_missing_or_damaged_scheduler_is_one_sentence(onnx: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["onnx", PAIR]) == 2
    assert "model.safetensors does not exist; `pipeline distill` writes it" in capsys.readouterr().err
    assert not FOLDER.exists()
    save(sized((6, 3)))
    (FOLDER / "model.safetensors").write_bytes(b"torn")
    assert cli.main(["onnx", PAIR]) == 2
    assert "is not a safetensors file" in capsys.readouterr().err
    assert not FILE.exists()


def test_without_onnx_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save(sized((6, 3)))
    monkeypatch.setitem(sys.modules, "onnx", None)  # as Python has it for a module that cannot be found
    assert cli.main(["onnx", PAIR]) == 2
    assert capsys.readouterr().err == (
        "pipeline: `pipeline onnx` needs onnx, which is not installed: pip install -e '.[onnx]'.\n"
    )
    assert {path.name for path in FOLDER.iterdir()} == {"model.safetensors", "config.json", "README.md"}


# --- the file and the stages -----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # dvc's own, about its trie
def test_dvc_does_not_take_the_file_for_a_changed_scheduler(tmp_path: Path) -> None:
    from dvc.repo import Repo

    shutil.copy(ROOT / ".dvcignore", tmp_path)
    (tmp_path / "dvc.yaml").write_text(f"stages:\n  distill:\n    cmd: 'true'\n    outs:\n      - {FOLDER}\n")
    save(sized((6, 3)))
    Repo.init(str(tmp_path), no_scm=True).close()
    with Repo(str(tmp_path)) as repo:
        repo.commit("distill", force=True)
        assert repo.status() == {}
        FILE.write_bytes(b"onnx")
        assert repo.status() == {}
        (FOLDER / "README.md").write_text("another card")
        assert repo.status() != {}, "dvc looks at the folder"
