from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.treegraft.tiny import tiny_language_model, tiny_tokenizer
from treegraft.draft_vocabulary import DraftVocabulary
from treegraft.errors import UserError
from treegraft.models import LanguageModel
from treegraft.vocabulary import check_vocabularies, tokenizer_hash


def model(name: str, tokens: int = 64, rows: int | None = None, renamed: dict[str, str] | None = None) -> LanguageModel:
    """A tiny model of `rows` embedding rows whose tokenizer has `tokens` tokens, some under another name."""
    return replace(
        tiny_language_model(vocab_size=rows or tokens, name=name),
        tokenizer=renamed_tokenizer(tokens, renamed or {}),
        vocab_size=tokens,
    )


def renamed_tokenizer(tokens: int, renamed: dict[str, str]) -> PreTrainedTokenizerFast:
    text = tiny_tokenizer(tokens).backend_tokenizer.to_str()
    for old, new in renamed.items():
        assert f'"{old}"' in text
        text = text.replace(f'"{old}"', f'"{new}"')
    tokenizer = type(tiny_tokenizer(2).backend_tokenizer).from_str(text)
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    special = {role: renamed.get(token, token) for role, token in names.items()}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def test_equal_vocabularies_share_all_tokens() -> None:
    assert check_vocabularies(model("big"), model("small")) == DraftVocabulary(64)


def test_padding_of_the_embeddings_does_not_matter() -> None:
    assert check_vocabularies(model("big", rows=96), model("small", rows=72)) == DraftVocabulary(64)


def test_a_drafter_with_more_tokens_is_held_to_the_targets() -> None:
    assert check_vocabularies(model("big", 60), model("small", 64)) == DraftVocabulary(60)


def test_a_drafter_with_fewer_strings_but_enough_rows_may_draft_those_it_knows() -> None:
    assert check_vocabularies(model("big", 64), model("small", 60, rows=64)) == DraftVocabulary(60)


def test_a_drafter_that_cannot_read_the_targets_tokens_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"target 'big' and drafter 'small' .*64 tokens and the drafter only 60 .*' w60'"
    ):
        check_vocabularies(model("big", 64), model("small", 60))


def test_the_first_differing_token_is_named_with_both_strings() -> None:
    other = model("small", renamed={" w7": " other", " w9": " more"})
    with pytest.raises(UserError, match="share a vocabulary: token 7 is ' w7' for the one and ' other' for the other"):
        check_vocabularies(model("big"), other)


def test_a_differing_special_token_is_called_special() -> None:
    with pytest.raises(UserError, match="special token 1 is '</s>' for the one and '<end>' for the other"):
        check_vocabularies(model("big"), model("small", renamed={"</s>": "<end>"}))


def test_the_hash_survives_saving_and_tells_tokenizers_apart(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    assert tokenizer_hash(AutoTokenizer.from_pretrained(tmp_path)) == tokenizer_hash(tokenizer)
    assert tokenizer_hash(tiny_tokenizer()) == tokenizer_hash(tokenizer)
    others = [tiny_tokenizer(63), renamed_tokenizer(64, {" w7": " other"}), renamed_tokenizer(64, {"</s>": "<end>"})]
    extended = tiny_tokenizer()
    extended.add_special_tokens({"additional_special_tokens": [" w9"]})
    hashes = [tokenizer_hash(each) for each in (tokenizer, *others, extended)]
    assert len(set(hashes)) == len(hashes)


def test_the_hash_is_the_same_on_every_machine() -> None:
    assert tokenizer_hash(tiny_tokenizer(4)) == "a9b4d58df5e3c246715483d5b439529b56d3107f3ce43e81ca1a8440b1734584"
