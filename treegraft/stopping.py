"""When a request ends: EOS, a stop string, the length limit or the context's end, checked token by token in order."""

from typing import Literal

from transformers import PreTrainedTokenizerBase

from treegraft.errors import UserError

TAIL_MARGIN = 16  # tokens without text of their own (parts of one character, special tokens) in a tail
Finish = Literal["eos", "stop", "length", "context"]


class StopChecker:
    """Decides after every emitted token whether the request ends there.

    A token that ends the text for its meaning (EOS, stop string) says so even when it is also the last one allowed.

    Args:
        eos: token ids that end a text; stop: strings that end it (cut from the text, with all behind them).
        limit: emitted tokens at most; limit_reason: what a text of that length ran into.
        tokenizer: needed for stop strings only.
    """

    def __init__(
        self,
        eos: tuple[int, ...],
        limit: int,
        limit_reason: Finish = "length",
        stop: tuple[str, ...] = (),
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        if "" in stop:
            raise UserError("a stop string is empty, which every text contains; remove it.")
        self.eos = frozenset(eos)
        self.limit = limit
        self.limit_reason = limit_reason
        self.stop = stop
        self.tokenizer = tokenizer
        self.emitted: list[int] = []

    @property
    def remaining(self) -> int:
        """Tokens that may still be emitted."""
        return self.limit - len(self.emitted)

    def add(self, token: int) -> Finish | None:
        """Note an emitted token; says why the text ends with it, or None when it goes on."""
        self.emitted.append(token)
        if token in self.eos:
            return "eos"
        if self.stop and self._stopped():
            return "stop"
        if len(self.emitted) >= self.limit:
            return self.limit_reason
        return None

    def text(self) -> str:
        """The emitted text without special tokens and without a stop string or what follows it."""
        if self.tokenizer is None:
            return ""
        text = self._decoded(self.emitted)
        places = [text.find(string) for string in self.stop]
        at = min((place for place in places if place >= 0), default=len(text))
        return self._before_special_stop() if self.stop and at == len(text) else text[:at]

    def _before_special_stop(self) -> str:
        """``text`` where a stop string shows only among special tokens; all of it if none does."""
        whole = self._decoded(self.emitted, special=True)
        at = min((place for string in self.stop if (place := whole.find(string)) >= 0), default=len(whole))
        count = len(self.emitted)
        while count and len(before := self._decoded(self.emitted[:count], special=True)) > at:
            count -= 1
        text = self._decoded(self.emitted[:count])
        assert self.tokenizer is not None
        if count == len(self.emitted) or self.emitted[count] in self.tokenizer.all_special_ids:
            return text
        return text + whole[len(before) if count else 0 : at]  # what stands before the stop string in its first token

    def _stopped(self) -> bool:
        """Whether the newest token completes a stop string, which may begin and end inside tokens.

        Only the tail that can hold one is decoded: more tokens where many of them have no text of their own.
        """
        longest = max(map(len, self.stop))
        count = longest + TAIL_MARGIN
        while count < len(self.emitted) and len(self._decoded(self.emitted[-count:-1])) < longest:
            count *= 2
        # A stop string may run across special tokens as if they were not there, and it may hold (a part of) one.
        tails = [self._decoded(self.emitted[-count:], special) for special in (False, True)]
        return any(string in tail for string in self.stop for tail in tails)

    def _decoded(self, tokens: list[int], special: bool = False) -> str:
        assert self.tokenizer is not None
        return str(self.tokenizer.decode(tokens, skip_special_tokens=not special))
