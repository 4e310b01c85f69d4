"""Says whether a drafter's tokens mean the same as the target's, and gives a tokenizer a hash to be recognised by.

Token ids are all that the two models exchange, and text becomes ids by the target's tokenizer alone. So what must agree
is the string behind each id; merges, normalisation and chat templates of the drafter's tokenizer do not matter.
"""

import hashlib
import json

from transformers import PreTrainedTokenizerBase

from treegraft.draft_vocabulary import DraftVocabulary
from treegraft.errors import UserError
from treegraft.models import LanguageModel


def check_vocabularies(target: LanguageModel, drafter: LanguageModel) -> DraftVocabulary:
    """The tokens that the drafter may propose: those that both models know and its head has a row for.

    Raises:
        UserError: an id stands for two strings (the message shows the first), or the target can emit ids that the
        drafter has no embedding for, so that it could not go on after them.
    """
    pair = f"target '{target.name}' and drafter '{drafter.name}'"
    shared = min(target.vocab_size, drafter.vocab_size)
    target_tokens, drafter_tokens = _tokens(target.tokenizer), _tokens(drafter.tokenizer)
    for token in range(shared):
        ours, theirs = target_tokens.get(token), drafter_tokens.get(token)
        # An id without a string is a hole: it takes no part in text, and whatever the other model has there is never
        # emitted.
        if ours is not None and theirs is not None and ours != theirs:
            special = {token} & ({*target.tokenizer.all_special_ids} | {*drafter.tokenizer.all_special_ids})
            raise UserError(
                f"{pair} do not share a vocabulary: {'special ' if special else ''}token {token} is {ours!r} "
                f"for the one and {theirs!r} for the other; choose a drafter of the target's family"
            )
    rows = int(drafter.module.config.vocab_size)
    if rows < target.vocab_size:
        raise UserError(
            f"{pair} do not share a vocabulary: the target has {target.vocab_size} tokens and the drafter only {rows} "
            f"(the first that it lacks is {target_tokens.get(rows)!r}); choose a drafter of the target's family"
        )
    if drafter.draft_tokens is None:
        return DraftVocabulary(shared)
    known = drafter.draft_tokens[drafter.draft_tokens < shared]
    return DraftVocabulary(len(known), known)


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """sha256 (hex) of a tokenizer's strings by id and of its special tokens; saving and loading does not change it."""
    content = {
        "tokens": sorted(_tokens(tokenizer).items()),
        "special_ids": sorted(set(tokenizer.all_special_ids)),
        "special": {role: str(token) for role, token in tokenizer.special_tokens_map.items() if isinstance(token, str)},
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """{token id: its string}, added tokens included."""
    return {index: token for token, index in tokenizer.get_vocab().items()}
