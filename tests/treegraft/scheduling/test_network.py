"""The numpy network: the arithmetic of a multilayer perceptron, single and batched."""

import sys
from itertools import pairwise
from subprocess import run

import numpy as np
import pytest

from treegraft.scheduling.network import MarginNetwork


def random_network(sizes: tuple[int, ...], seed: int = 0) -> MarginNetwork:
    rng = np.random.default_rng(seed)
    return MarginNetwork(
        [rng.normal(size=shape) / shape[0] ** 0.5 for shape in pairwise(sizes)],
        [rng.normal(size=size) for size in sizes[1:]],
        rng.normal(size=sizes[0]),
        rng.uniform(0.5, 2, size=sizes[0]),
    )


def test_computes_a_standardised_perceptron() -> None:
    network = random_network((5, 8, 3, 2))
    features = np.random.default_rng(1).normal(size=(7, 5))
    values = (features - network.means) / network.scales
    for weight, bias in zip(network.weights[:-1], network.biases[:-1], strict=True):
        values = np.maximum(values @ weight.astype(np.float64) + bias, 0)
    expected = values @ network.weights[-1].astype(np.float64) + network.biases[-1]
    np.testing.assert_allclose(network.margins(features), expected, rtol=1e-5, atol=1e-5)


def test_single_rows_equal_the_batch_and_stay_float32() -> None:
    network = random_network((17, 64, 32, 1))
    batch = np.random.default_rng(1).normal(size=(20, 17)).astype(np.float32)
    rows = np.stack([network.margins(row) for row in batch])
    assert rows.shape == (20, 1)
    assert rows.dtype == network.margins(batch).dtype == network.margins(batch.astype(np.float64)).dtype == np.float32
    np.testing.assert_allclose(rows, network.margins(batch), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(rows, [network.of_state(row.tolist()) for row in batch])


def test_leaves_its_input_and_earlier_results_alone() -> None:
    network = random_network((3, 4, 1))
    features = np.ones(3, dtype=np.float32)
    first = network.margins(features)
    kept = first.copy()
    network.margins(np.zeros(3, dtype=np.float32))
    assert (features == 1).all()
    assert (first == kept).all()


def test_without_hidden_layers_it_is_linear() -> None:
    network = MarginNetwork([np.array([[2.0], [0.0]])], [np.array([1.0])], np.array([1.0, 0.0]), np.array([2.0, 1.0]))
    assert (network.features, network.outputs, network.hidden) == (2, 1, ())
    assert network.margins(np.array([3.0, 9.0])) == pytest.approx([3.0])


def test_refuses_shapes_that_do_not_fit() -> None:
    weight, bias, one = np.ones((2, 1)), np.ones(1), np.ones(2)
    for arguments in (
        ([], [], one, one),
        ([weight], [bias, bias], one, one),
        ([weight], [np.ones(2)], one, one),
        ([weight, weight], [bias, bias], one, one),
        ([np.ones(2)], [bias], one, one),
        ([weight], [bias], np.ones(3), one),
        ([weight], [bias], one, np.array([1.0, 0.0])),
        ([weight], [bias], one, np.array([1.0, np.nan])),
    ):
        with pytest.raises(ValueError, match=r"fit|make|above|inputs"):
            MarginNetwork(*arguments)


def test_is_immutable() -> None:
    network = random_network((3, 4, 1))
    with pytest.raises(ValueError, match="read-only"):
        network.weights[0][0, 0] = 1


def test_needs_neither_torch_nor_lightning() -> None:
    check = "import sys, treegraft.scheduling.network; sys.exit(any(m in sys.modules for m in ('torch', 'lightning')))"
    assert run([sys.executable, "-c", check], check=False).returncode == 0
