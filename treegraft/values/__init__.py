"""The offline value system: what every schedule would have achieved at every position, and what that is worth."""
