"""What the decoder asks of a drafter."""

from typing import Protocol

from treegraft.settings import DraftSettings
from treegraft.tree import DraftTree, IntArray


class Drafter(Protocol):
    """A source of nodes; ``index`` is its place in the decoder's list (0: the cheapest), and its action."""

    name: str
    index: int

    def begin(self, prompt: IntArray, capacity: int) -> None:
        """Forget the last request; the prompt (int64 [n]) is committed and its last token is the first tree's root.

        ``capacity`` tokens of text and tree will be needed at most.
        """
        ...

    def draft(self, tree: DraftTree, settings: DraftSettings, layer: int, max_depth: int) -> None:
        """Grow the tree by one layer; no node may come to lie deeper than ``max_depth``."""
        ...

    def commit(self, tree: DraftTree, accepted: IntArray, tokens: IntArray, alternatives: IntArray) -> None:
        """The step is over.

        Args:
            accepted: int64 [a], the tree's accepted nodes in path order.
            tokens: int64 [a or a + 1], the tokens emitted; the last one is the next tree's root.
            alternatives: int64 [len(tokens), r], the target's likeliest tokens in place of each, best first.
        """
        ...

    @property
    def hits(self) -> float:
        """Share of the latest committed tokens that it foresaw where it was asked, as a moving average."""
        ...

    @property
    def tokens_processed(self) -> int:
        """Tokens that went through a model since ``begin``; 0 for a drafter without one."""
        ...
