"""How the target's next token is chosen: argmax, or one uniform number per emitted token through the inverse CDF.

Processing of logits (temperature, top-k, top-p, min-p, repetition penalty) is transformers' own.
"""

from dataclasses import dataclass

import numpy as np
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from treegraft.errors import UserError
from treegraft.tree import IntArray


@dataclass(frozen=True)
class SamplingSettings:
    """Names and meanings are those of transformers' generation arguments; temperature 0 is greedy decoding."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        checks = {
            # Colder than 1e-4 the scores overflow; 0 is exact.
            "temperature": self.temperature == 0 or 1e-4 <= self.temperature < float("inf"),
            "top_k": self.top_k >= 0,
            "top_p": 0 < self.top_p <= 1,
            "min_p": 0 <= self.min_p <= 1,
            "repetition_penalty": 0 < self.repetition_penalty < float("inf"),
            "seed": self.seed >= 0,
        }
        for name, holds in checks.items():
            if not holds:
                raise UserError(f"sampling setting {name} is {getattr(self, name)}, which is outside its range.")


def prompt_seed(seed: int, prompt: IntArray) -> int:
    """The seed for one of many prompts (token ids, int64 [n]), so that their answers do not draw the same numbers."""
    return int(np.random.SeedSequence([seed, *prompt.tolist()]).generate_state(1)[0])


class TokenChooser:
    """Chooses the target's tokens of one request in text order.

    One uniform number is drawn per chosen token, so plain decoding and tree decoding with the same seed consume the
    same numbers and, in fp32, emit the same text.
    """

    def __init__(self, settings: SamplingSettings, record: bool = False) -> None:
        self.settings = settings
        self.record = record
        self.scores: list[torch.Tensor] = []
        """What every token was chosen from, [vocabulary] each, if ``record``."""
        self.greedy = settings.temperature == 0
        self._random = np.random.default_rng(settings.seed)
        processors = LogitsProcessorList()
        if settings.repetition_penalty != 1.0:
            processors.append(RepetitionPenaltyLogitsProcessor(settings.repetition_penalty))
        if not self.greedy:
            if settings.temperature != 1.0:
                processors.append(TemperatureLogitsWarper(settings.temperature))
            if settings.top_k:
                processors.append(TopKLogitsWarper(settings.top_k))
            if settings.top_p < 1.0:
                processors.append(TopPLogitsWarper(settings.top_p))
            if settings.min_p:
                processors.append(MinPLogitsWarper(settings.min_p))
        self.processors = processors
        self.plain_argmax = self.greedy and len(processors) == 0 and not record
        """True where a token depends on nothing but its own row of logits: all rows can be decided at once."""

    def choose(self, logits: torch.Tensor, text: list[int]) -> int:
        """The next token.

        Args:
            logits: [vocabulary] of the target after ``text``; text: all tokens so far, the prompt's included.
        """
        scores = logits.float()[None]
        if len(self.processors):
            # Only the penalty looks at the text, which may be long.
            penal = self.settings.repetition_penalty != 1.0
            ids = torch.tensor([text if penal else []], dtype=torch.int64, device=logits.device)
            # one by one: the list's own call inspects every processor's signature anew for each token
            for processor in self.processors:
                scores = processor(ids, scores)
        if self.record:
            self.scores.append(scores[0].clone())  # no view that would keep all rows of the step
        if self.greedy:
            return int(scores.argmax())
        cumulative = torch.softmax(scores[0].double(), dim=-1).cumsum(0)
        draw = self._random.random() * float(cumulative[-1])
        token = int(torch.searchsorted(cumulative, torch.tensor(draw, device=cumulative.device), right=True))
        return min(token, len(cumulative) - 1)
