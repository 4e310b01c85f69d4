"""The scheduler's network at run time: a small multilayer perceptron in numpy.

It knows nothing of torch or of files: the student is trained in pipeline/student.py and stored by
treegraft/scheduling/checkpoint.py. One decision must cost less than 50 microseconds, of which a framework's call
overhead alone would take most; so there are few numpy calls, on a few dozen float32 numbers.
"""

from array import array
from collections.abc import Sequence

import numpy as np

_ZERO = np.zeros((), dtype=np.float32)  # converted once, not at every call


class MarginNetwork:
    """Predicts how many tokens each dearer drafter is worth over the light one in one scheduling state.

    ``z = (features - means) / scales``, then linear layers with a ReLU between them. Immutable, and without scratch
    buffers (preallocating them saves a microsecond at most), so one instance may serve many threads.

    Args:
        weights: one matrix [inputs, outputs] a layer; the first has F inputs, the last m - 1 outputs.
        biases: one vector [outputs] a layer.
        means: [F] of the training features.
        scales: [F] of the training features, each above 0.

    Raises:
        ValueError: the shapes do not fit one another, or a scale is not above 0.
    """

    def __init__(
        self,
        weights: Sequence[np.ndarray],
        biases: Sequence[np.ndarray],
        means: np.ndarray,
        scales: np.ndarray,
    ) -> None:
        self.weights = tuple(_frozen(weight) for weight in weights)
        self.biases = tuple(_frozen(bias) for bias in biases)
        self.means = _frozen(means)
        self.scales = _frozen(scales)
        self._check_shapes()
        # Standardising is linear: the first layer does it on the way. Computed in float64 and rounded once.
        first = self.weights[0] / self.scales.astype(np.float64)[:, None]
        weights = [first, *self.weights[1:]]
        biases = [self.biases[0] - self.means.astype(np.float64) @ first, *self.biases[1:]]
        # So are biases: they are one more row, for an input of 1, which every hidden layer hands on in one more unit.
        layers = [np.vstack([weight, bias]) for weight, bias in zip(weights, biases, strict=True)]
        one = [np.eye(len(layer))[:, -1:] for layer in layers[:-1]]
        self._inner = tuple(_frozen(np.hstack(pair)) for pair in zip(layers[:-1], one, strict=True))
        self._last = _frozen(layers[-1])

    def _check_shapes(self) -> None:
        if not self.weights or len(self.weights) != len(self.biases):
            raise ValueError(f"{len(self.weights)} weight matrices and {len(self.biases)} biases do not make a network")
        width = self.weights[0].shape[0] if self.weights[0].ndim == 2 else -1
        if self.means.shape != (width,) or self.scales.shape != (width,):
            raise ValueError(f"means {self.means.shape} and scales {self.scales.shape} do not fit {width} features")
        if not (self.scales > 0).all():
            raise ValueError("every feature's scale must be above 0")
        for layer, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            if weight.ndim != 2 or weight.shape[0] != width or bias.shape != weight.shape[1:]:
                raise ValueError(f"layer {layer}: weight {weight.shape} and bias {bias.shape} after {width} inputs")
            width = weight.shape[1]

    @property
    def features(self) -> int:
        """Number of input features, F."""
        return self.weights[0].shape[0]

    @property
    def outputs(self) -> int:
        """Number of margins, m - 1: one for each drafter but the light one."""
        return self.weights[-1].shape[1]

    @property
    def hidden(self) -> tuple[int, ...]:
        """Widths of the hidden layers."""
        return tuple(weight.shape[1] for weight in self.weights[:-1])

    def margins(self, features: np.ndarray) -> np.ndarray:
        """Margins in tokens, float32 [m - 1] for features [F], or [n, m - 1] for features [n, F].

        Raises:
            ValueError: the last axis of ``features`` is not F long (numpy's own message).
        """
        rows = np.asarray(features, np.float32)  # float64 would turn every product into a slow mixed-type one
        return self._forward(np.concatenate([rows, np.ones((*rows.shape[:-1], 1), np.float32)], axis=-1))

    def of_state(self, features: list[float]) -> list[float]:
        """The margins [m - 1] of one state, as ``margins`` has them, with fewer calls: a decision has a list."""
        found: list[float] = self._forward(np.frombuffer(array("f", [*features, 1.0]), np.float32)).tolist()
        return found

    def _forward(self, values: np.ndarray) -> np.ndarray:
        """Features followed by a 1 [.., F + 1] -> margins [.., m - 1]."""
        for weight in self._inner:
            values = values.dot(weight)  # less call overhead than @
            np.maximum(values, _ZERO, out=values)
        return values.dot(self._last)


def _frozen(values: np.ndarray) -> np.ndarray:
    """A read-only, contiguous float32 copy."""
    copy = np.array(values, dtype=np.float32, order="C")
    copy.flags.writeable = False
    return copy
