"""The student: a small network that learns, from labelled scheduling states, what each dearer drafter is worth.

It knows nothing of tables or of files. ``fit_student`` gets states and a function that says how good a network is (the
replayed speed, in stage ``distill``) and returns the best network it saw, as the numpy network that will run.
"""

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import lightning
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from pipeline.labelled import LabelledStates
from treegraft.errors import UserError
from treegraft.scheduling.network import MarginNetwork

# Predicted advantage, in units of the labels' root mean square, over which the soft choice below goes from one action
# to the other. At 0.5 a typical margin is a clear decision (e^2 : 1), and the gradient gathers around the boundary.
CHOICE_TEMPERATURE = 0.5


class DivergedError(UserError):
    """The training has left the finite numbers."""


@dataclass(frozen=True)
class FittedStudent:
    """The best network of one training run."""

    network: MarginNetwork
    score: float
    """Its score."""
    epoch: int
    """The epoch after which it was taken, from 0."""
    scores: tuple[float, ...]
    """Score after every epoch that ran."""


class Student(lightning.LightningModule):
    """Multilayer perceptron on standardised features; predicts margins in tokens.

    Args are plain numbers, so that a Lightning checkpoint of it reloads.
        features: F.
        outputs: m - 1.
        hidden: widths of the hidden layers.
        learning_rate: of AdamW at the start; it falls to 0 along a cosine.
        weight_decay: of AdamW.
        epochs: length of the cosine.
    """

    means: torch.Tensor
    scales: torch.Tensor
    margin_scale: torch.Tensor

    def __init__(
        self,
        features: int,
        outputs: int,
        hidden: Sequence[int],
        learning_rate: float = 1e-3,
        weight_decay: float = 1e-4,
        epochs: int = 60,
    ) -> None:
        super().__init__()
        hidden = list(hidden)
        self.save_hyperparameters()
        sizes = [features, *hidden, outputs]
        layers: list[torch.nn.Module] = []
        for inputs, width in pairwise(sizes):
            layers += [torch.nn.Linear(inputs, width), torch.nn.ReLU()]
        self.layers = torch.nn.Sequential(*layers[:-1])
        self.register_buffer("means", torch.zeros(features))
        self.register_buffer("scales", torch.ones(features))
        self.register_buffer("margin_scale", torch.ones(()))

    def standardise(self, states: LabelledStates) -> None:
        """Take the features' means and scales, and the margins' unit, from the rows that carry weight."""
        used = states.weights > 0
        features = states.features[used].astype(np.float64)
        scales = features.std(axis=0)
        means = features.mean(axis=0)
        # A feature that never varies gets scale 1: what rounding leaves of its spread must not be blown up.
        scales = np.where(scales > 1e-6 * np.maximum(1.0, np.abs(means)), scales, 1.0)
        self.means.copy_(torch.from_numpy(means))
        self.scales.copy_(torch.from_numpy(scales))
        # Only a scale, no shift: the sign of a margin is the decision.
        squares = np.average(states.margins[used].astype(np.float64) ** 2, axis=0, weights=states.weights[used])
        self.margin_scale.fill_(float(np.sqrt(squares.mean())) or 1.0)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Margins in tokens [n, m - 1] for features [n, F]."""
        return self.layers((features - self.means) / self.scales) * self.margin_scale

    def training_step(self, batch: tuple[torch.Tensor, ...], batch_index: int) -> torch.Tensor:
        """Loss of one batch: features [n, F], margins [n, m - 1], weights [n] (mean 1 over the training rows)."""
        features, margins, weights = batch
        predicted = self(features) / self.margin_scale
        return (weights * margin_loss(predicted, margins / self.margin_scale)).mean()

    def configure_optimizers(self) -> Any:
        """AdamW with a cosine over the epochs."""
        settings = self.hparams
        optimizer = torch.optim.AdamW(
            self.parameters(), lr=settings["learning_rate"], weight_decay=settings["weight_decay"], fused=True
        )
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=settings["epochs"])]

    def to_network(self) -> MarginNetwork:
        """The numpy network that computes what ``forward`` computes."""
        linear = [layer for layer in self.layers if isinstance(layer, torch.nn.Linear)]
        weights = [layer.weight.detach().cpu().numpy().T for layer in linear]
        biases = [layer.bias.detach().cpu().numpy() for layer in linear]
        unit = self.margin_scale.cpu().numpy()
        weights[-1], biases[-1] = weights[-1] * unit, biases[-1] * unit
        return MarginNetwork(weights, biases, self.means.cpu().numpy(), self.scales.cpu().numpy())


def margin_loss(predicted: torch.Tensor, margins: torch.Tensor) -> torch.Tensor:
    """Loss of each row [n], for predicted and true margins [n, m - 1] in units of the labels' root mean square.

    Two terms. Squared error makes the network the mean margin given the features, whose sign is the best decision. (Not
    Huber: that drifts towards the median, and margins are skewed - most calls lose a little, a few win much.) It spends
    its effort on states far from the boundary, though, where the decision is clear anyway. So the second term is a
    logistic loss of every choice between two actions, weighted by what the wrong choice costs: |margin| tokens. Its
    optimum, log(E[margin+] / E[margin-]), has the sign of the mean margin too. Weighting the squared error itself by
    |margin| would not: rare large margins would outvote many small ones twice over.
    """
    squared = ((predicted - margins) ** 2).mean(dim=1)
    light = torch.zeros_like(margins[:, :1])
    true, guess = torch.cat([light, margins], dim=1), torch.cat([light, predicted], dim=1)
    first, second = torch.triu_indices(true.shape[1], true.shape[1], offset=1, device=true.device)
    gap = true[:, first] - true[:, second]
    guessed_gap = (guess[:, first] - guess[:, second]) / CHOICE_TEMPERATURE
    choice = gap.abs() * torch.nn.functional.softplus(-gap.sign() * guessed_gap)
    return squared + choice.mean(dim=1)


class _BestByScore(lightning.Callback):
    """Keeps the network with the best score, and stops when it has not improved for ``patience`` epochs.

    The networks stay in memory: a checkpoint file could be one of an earlier run (Lightning issue 5000). Scores are
    computed alike in every process of a distributed run, so all stop together.
    """

    def __init__(self, score: Callable[[MarginNetwork], float], patience: int) -> None:
        self.score = score
        self.patience = patience
        self.scores: list[float] = []
        self.best: tuple[float, int, MarginNetwork] | None = None

    def on_train_epoch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Score the network as it would be exported now."""
        assert isinstance(pl_module, Student)
        network = pl_module.to_network()
        if not all(np.isfinite(array).all() for array in (*network.weights, *network.biases)):
            raise DivergedError(f"Training diverged in epoch {trainer.current_epoch}; lower distill.learning_rate.")
        score = self.score(network)
        self.scores.append(score)
        if self.best is None or score > self.best[0]:
            self.best = (score, trainer.current_epoch, network)
        elif trainer.current_epoch - self.best[1] >= self.patience:
            trainer.should_stop = True


def fit_student(
    states: LabelledStates,
    score: Callable[[MarginNetwork], float],
    *,
    hidden: Sequence[int],
    learning_rate: float,
    weight_decay: float,
    epochs: int,
    batch_size: int,
    patience: int,
    seed: int,
    trainer_options: dict[str, Any] | None = None,
) -> FittedStudent:
    """Train one student; equal arguments give an equal network.

    Args:
        states: training rows.
        score: how good a network is, higher is better; asked after every epoch.
        hidden, learning_rate, weight_decay, epochs: see ``Student``.
        batch_size: rows a step.
        patience: epochs without a better score after which training stops.
        seed: of initial weights and of the order of rows.
        trainer_options: for ``lightning.Trainer``, over the defaults (e.g. {"devices": 2, "strategy": "ddp"}).

    Raises:
        DivergedError: training diverged.
    """
    lightning.seed_everything(seed, workers=True, verbose=False)
    student = Student(states.features.shape[1], states.margins.shape[1], hidden, learning_rate, weight_decay, epochs)
    student.standardise(states)
    keeper = _BestByScore(score, patience)
    # One CPU device by default: a step of this network is faster there than its transfer to a GPU. No loggers and no
    # checkpoints: nothing is written anywhere.
    options: dict[str, Any] = {"accelerator": "cpu", "devices": 1} | (trainer_options or {})
    with _quiet_lightning():
        trainer = lightning.Trainer(
            max_epochs=epochs,
            deterministic=True,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[keeper],
            **options,
        )
        trainer.fit(student, train_dataloaders=_loader(states, batch_size, seed))
    assert keeper.best is not None  # epochs >= 1, checked with the parameters
    best_score, epoch, network = keeper.best
    return FittedStudent(network, best_score, epoch, tuple(keeper.scores))


class _Rows(Dataset[tuple[torch.Tensor, ...]]):
    """All rows in one tensor each; an item is a whole batch, cut out by an index tensor [batch]."""

    def __init__(self, *columns: np.ndarray) -> None:
        self.columns = [torch.from_numpy(np.ascontiguousarray(column, dtype=np.float32)) for column in columns]

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(column[rows] for column in self.columns)


class _Batches(Sampler[torch.Tensor]):
    """Index tensors of one epoch, shuffled anew each time; in a distributed run Lightning deals them out."""

    def __init__(self, rows: int, batch_size: int, seed: int) -> None:
        self.rows, self.batch_size = rows, batch_size
        self.generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return -(-self.rows // self.batch_size)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.randperm(self.rows, generator=self.generator).split(self.batch_size))


def _loader(states: LabelledStates, batch_size: int, seed: int) -> DataLoader[tuple[torch.Tensor, ...]]:
    """Batches cut from whole tensors: one indexing a batch, no row-wise collation and no worker processes."""
    used = states.weights > 0
    weights = states.weights[used] / states.weights[used].mean()
    rows = _Rows(states.features[used], states.margins[used], weights)
    return DataLoader(rows, sampler=_Batches(len(rows), batch_size, seed), batch_size=None)


@contextmanager
def _quiet_lightning() -> Iterator[None]:
    """Without Lightning's notes on accelerators, workers and loggers, none of which concern a network this small."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"lightning\..*")
            yield
    finally:
        logger.setLevel(level)
