"""What the decoder asks of a drafter."""

from typing import Protocol

from treegraft.settings import DraftSettings
from treegraft.tree import DraftTree, IntArray


class Drafter(Protocol):
    """A source of nodes; ``index`` is its place in the decoder's list (0: the cheapest), and its action."""

    name: str
    index: int

    def begin(self, capacity: int) -> None:
        """Forget the last request; ``capacity`` tokens of text and tree will be needed at most."""
        ...

    def extend(self, tokens: IntArray) -> None:
        """Tokens (int64 [n]) have been committed behind the earlier ones; the last one is the next tree's root."""
        ...

    def draft(self, tree: DraftTree, settings: DraftSettings, layer: int, max_depth: int) -> None:
        """Grow the tree by one layer; no node may come to lie deeper than ``max_depth``."""
        ...

    def commit(self, tree: DraftTree, accepted: IntArray) -> None:
        """The step is over; ``accepted`` (int64 [a]) are the tree's accepted nodes in path order. Comes before
        ``extend`` with the step's tokens."""
        ...

    @property
    def tokens_processed(self) -> int:
        """Tokens that went through a model since ``begin``; 0 for a drafter without one."""
        ...
