"""Drafters: sources of draft-tree nodes, ordered by cost in a decoder's list."""

from treegraft.drafters.base import Drafter
from treegraft.drafters.lm import LanguageModelDrafter
from treegraft.drafters.ngram import NgramDrafter, NgramIndex

__all__ = ["Drafter", "LanguageModelDrafter", "NgramDrafter", "NgramIndex"]
