"""What one request did: sums and counts only; whoever reports divides once, at the end."""

from dataclasses import dataclass, field


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
    processed: dict[str, int] = field(default_factory=dict)
    """Tokens that went through each model, by name."""

    @property
    def other_ms(self) -> float:
        named = self.prefill_ms + self.draft_light_ms + self.draft_strong_ms + self.verify_ms + self.scheduler_ms
        return self.seconds * 1000 - named

    def count_step(self, accepted: int) -> None:
        """Note a step that emitted ``accepted`` drafted tokens."""
        self.steps += 1
        self.accepted_lengths.append(accepted)
        self.accepted_by_depth += [0] * (accepted - len(self.accepted_by_depth))
        for depth in range(accepted):
            self.accepted_by_depth[depth] += 1
