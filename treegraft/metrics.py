"""What one request did: sums and counts only; whoever reports divides once, at the end."""

from dataclasses import dataclass, field, fields
from itertools import zip_longest


@dataclass
class DecodingMetrics:
    """Counts and times of one ``Decoder.generate``.

    Tokens are tokens emitted: nothing after a stop is counted. Milliseconds are wall time; ``other`` is the request's
    total less the parts that are named.
    """

    prompt_tokens: int = 0
    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0
    calls: list[int] = field(default_factory=list)
    """Layers in which drafter i acted, [m]."""
    fallbacks: int = 0
    """Decisions that the scheduler could not take, so that the fallback schedule did."""
    accepted_by_depth: list[int] = field(default_factory=list)
    """Steps whose accepted length (bonus token left out) was at least 1, 2, ..."""
    accepted_lengths: list[int] = field(default_factory=list)
    """Accepted length of every step, as emitted."""
    verified_nodes: int = 0
    prefill_ms: float = 0.0
    """The target's forward over the prompt; a drafter's is part of its first call."""
    draft_light_ms: float = 0.0
    draft_strong_ms: float = 0.0
    verify_ms: float = 0.0
    scheduler_ms: float = 0.0
    forward_ms: float = 0.0
    """Inside the models' forwards, prefill left out; part of the drafting and verifying times. What remains of a step
    is the engine's own. On a GPU, forwards return before they are done and the figure says nothing."""
    processed: dict[str, int] = field(default_factory=dict)
    """Tokens that went through each model, by name."""

    @property
    def other_ms(self) -> float:
        named = self.prefill_ms + self.draft_light_ms + self.draft_strong_ms + self.verify_ms + self.scheduler_ms
        return self.seconds * 1000 - named

    def add(self, other: "DecodingMetrics") -> None:
        """Count another request in."""
        for entry in fields(self):
            mine, its = getattr(self, entry.name), getattr(other, entry.name)
            if entry.name == "accepted_lengths":
                total = mine + its
            elif isinstance(mine, list):
                total = [a + b for a, b in zip_longest(mine, its, fillvalue=0)]
            elif isinstance(mine, dict):
                total = {name: mine.get(name, 0) + its.get(name, 0) for name in mine | its}
            else:
                total = mine + its
            setattr(self, entry.name, total)

    def count_step(self, accepted: int) -> None:
        """Note a step that emitted ``accepted`` drafted tokens."""
        self.steps += 1
        self.accepted_lengths.append(accepted)
        self.accepted_by_depth += [0] * (accepted - len(self.accepted_by_depth))
        for depth in range(accepted):
            self.accepted_by_depth[depth] += 1
