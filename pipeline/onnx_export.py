"""Command onnx: a pair's scheduler network as one ONNX file, checked against the network that the decoder runs.

Reads models/schedulers/<pair>/ and writes model.onnx beside it::

    features  float32 [n, F]      in the order of the metadata's feature_names, as measured: the graph standardises them
    margins   float32 [n, m - 1]  tokens that drafter 1, 2, ... is worth over drafter 0, the light one
    metadata  pair and weights_sha256 as in config.json; feature_names and drafters as JSON lists

The graph's constants are the checkpoint's own tensors under their own names, besides ``means`` and ``scales``. Equal
schedulers give equal bytes (under one version of onnx).
"""

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.files import replacing
from treegraft.errors import UserError
from treegraft.scheduling.checkpoint import ONNX_FILE, SchedulerConfig, load_scheduler
from treegraft.scheduling.network import MarginNetwork

if TYPE_CHECKING:
    from onnx import ModelProto

    from pipeline.params import PairConfig

# Old enough for every runtime in use, and fixed: the newest of the installed package would change the bytes.
OPSET = 17
IR_VERSION = 8
ROWS = 512  # on which graph and network are compared
SPREAD = 3.0  # of these rows around the means, in standard deviations


def run(config: "PairConfig") -> None:
    """Write and check model.onnx of one pair; an earlier one is replaced at the very end.

    Raises:
        UserError: onnx is not installed; the scheduler is missing or damaged; the file is not valid ONNX or gives other
            margins than the network. An earlier file then stays as it was.
    """
    onnx = _import_onnx()
    folder = config.paths.scheduler
    network, scheduler = load_scheduler(folder)
    path = folder / ONNX_FILE
    with replacing(path) as temporary:
        temporary.write_bytes(model(network, scheduler).SerializeToString(deterministic=True))
        # What is checked is the file, not the object that it was made of.
        written = onnx.load_model_from_string(temporary.read_bytes())
        difference = check(written, network, scheduler.pair)
    print(
        f"{path}: {network.features} features to {network.outputs} margin(s); "
        f"at most {difference:.1e} tokens from the scheduler's own on {ROWS} random rows."
    )


def model(network: MarginNetwork, scheduler: SchedulerConfig) -> "ModelProto":
    """``network`` as an ONNX model; ``scheduler`` gives the metadata."""
    from onnx import TensorProto, helper, numpy_helper

    nodes = [
        helper.make_node("Sub", ["features", "means"], ["centred"]),
        helper.make_node("Div", ["centred", "scales"], ["standardised"]),
    ]
    constants = {"means": network.means, "scales": network.scales}
    values, last = "standardised", len(network.weights) - 1
    for layer, (weight, bias) in enumerate(zip(network.weights, network.biases, strict=True)):
        names = [f"layers.{layer}.weight", f"layers.{layer}.bias"]
        constants |= dict(zip(names, (weight, bias), strict=True))
        result = "margins" if layer == last else f"layers.{layer}"
        nodes.append(helper.make_node("Gemm", [values, *names], [result]))
        if layer != last:
            values = f"{result}.relu"
            nodes.append(helper.make_node("Relu", [result], [values]))
    graph = helper.make_graph(
        nodes,
        "scheduler",
        [helper.make_tensor_value_info("features", TensorProto.FLOAT, ["n", network.features])],
        [helper.make_tensor_value_info("margins", TensorProto.FLOAT, ["n", network.outputs])],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    # No version of TreeGraft: it would change the bytes of a scheduler that has not changed.
    made = helper.make_model(
        graph, producer_name="treegraft", opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION
    )
    metadata = {
        "pair": scheduler.pair,
        "weights_sha256": scheduler.weights_sha256,
        "feature_names": json.dumps(scheduler.feature_names),
        "drafters": json.dumps(scheduler.drafters),
    }
    helper.set_model_props(made, metadata)
    return made


def check(made: "ModelProto", network: MarginNetwork, pair: str) -> float:
    """The largest difference, in tokens, between the margins of ``made`` and of ``network`` on random rows.

    ``made`` is run by onnx's own reference evaluator.

    Raises:
        UserError: ``made`` is not valid ONNX, or the difference is more than rounding can explain.
    """
    import onnx
    from onnx.reference import ReferenceEvaluator

    try:
        onnx.checker.check_model(made, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise UserError(f"The ONNX file of {pair} is not valid and was not kept: {error}.") from error
    features = rows(network)
    results: Any = ReferenceEvaluator(made).run(None, {"features": features})
    margins = results[0]
    expected = network.margins(features)
    fault = f"this is a fault of `pipeline onnx` or of onnx {onnx.__version__}"
    if margins.shape != expected.shape or margins.dtype != expected.dtype:
        raise UserError(
            f"The ONNX file of {pair} gives {margins.dtype} {list(margins.shape)} instead of {expected.dtype} "
            f"{list(expected.shape)} and was not kept; {fault}."
        )
    largest, allowed = float(np.abs(margins - expected).max()), tolerance(network, features)
    if not largest <= allowed:  # NaN is refused too
        raise UserError(
            f"The ONNX file of {pair} gives margins up to {largest:.3g} tokens from the scheduler's own, where "
            f"rounding explains {allowed:.3g}, and was not kept; {fault}."
        )
    return largest


def rows(network: MarginNetwork) -> np.ndarray:
    """Random features around the means, float32 [ROWS, F]; the same for equal networks."""
    drawn = np.random.default_rng(0).normal(scale=SPREAD, size=(ROWS, network.features))
    return (network.means + network.scales * drawn).astype(np.float32)


def tolerance(network: MarginNetwork, features: np.ndarray) -> float:
    """By how many tokens two float32 evaluations of ``network`` on these rows may differ.

    Ten times the larger of two things: how far ``network`` itself is from its own arithmetic in float64, and the last
    place of its largest margin. A fixed number would be too strict where a feature hardly varies beside its mean, for
    the network standardises inside its first layer and the graph before it, or too lax everywhere else.
    """
    values = (features - network.means.astype(np.float64)) / network.scales
    for weight, bias in zip(network.weights[:-1], network.biases[:-1], strict=True):
        values = np.maximum(values @ weight + bias, 0)
    exact = values @ network.weights[-1] + network.biases[-1]
    own = np.abs(network.margins(features) - exact).max()
    return 10 * float(max(own, np.finfo(np.float32).eps * np.abs(exact).max()))


def _import_onnx() -> Any:
    try:
        import onnx
    except ModuleNotFoundError as error:
        if error.name != "onnx":
            raise  # installed, but broken
        raise UserError("`pipeline onnx` needs onnx, which is not installed: pip install -e '.[onnx]'.") from None
    return onnx
