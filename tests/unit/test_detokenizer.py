"""Pieces of text from single tokens: together they are the decoded whole, and no piece shows half a character."""

from __future__ import annotations

import json

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import normalizers, pre_tokenizers

from gateway.detokenizer import IncrementalDetokenizer
from gateway.tokenizer import Tokenizer
from tests.unit.tiny_tokenizers import byte_fallback, byte_level

BYTE_LEVEL = byte_level()
BYTE_FALLBACK = byte_fallback()
TOKENIZERS = [pytest.param(BYTE_LEVEL, id="byte_level"), pytest.param(BYTE_FALLBACK, id="byte_fallback")]
TEXTS = [
    "hello world, the ship",
    "naïve café",
    "你好世界。漢字",
    "👩‍👩‍👧 family 👍🏽 flags 🇫🇷🇯🇵",
    "mixed 你 and 👩 and é, then plain",
    "  leading and trailing  ",
    "\U0001d518\U0001d52b\U0001d526 \U0010ffff \u0000 �",
    "",
]


def pieces(tokenizer: Tokenizer, token_ids: list[int], prompt: list[int] | None = None) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt or [])
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_are_the_whole(tokenizer: Tokenizer, text: str) -> None:
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    got = pieces(tokenizer, token_ids)
    assert "".join(got) == tokenizer.decode(token_ids, skip_special_tokens=True) == text
    if "�" not in text:
        assert not any("�" in piece for piece in got)


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@given(text=st.text(max_size=60))
def test_any_text(tokenizer: Tokenizer, text: str) -> None:
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert "".join(pieces(tokenizer, token_ids)) == tokenizer.decode(token_ids, skip_special_tokens=True)


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@given(text=st.text(alphabet="helo wrdtsip👩你é\n", max_size=200))
def test_a_text_has_at_least_so_many_tokens(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False))
    assert tokenizer.least_tokens("x" * 100_000) > 0


@pytest.mark.parametrize("drops", ["normalizer", "pre_tokenizer", "added"])
def test_where_text_may_vanish_its_length_says_nothing(drops: str) -> None:
    backend = tokenizers.Tokenizer.from_str(BYTE_LEVEL._backend.to_str())
    if drops == "normalizer":
        backend.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])
    elif drops == "pre_tokenizer":
        backend.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    else:
        backend.add_special_tokens([tokenizers.AddedToken("<|x|>", rstrip=True)])
    assert Tokenizer(backend).least_tokens("x" * 10**6) == 0
    assert Tokenizer(backend).max_chars_per_token is None


@pytest.mark.parametrize("lacks", ["controls", "a continuation byte", "what is not ASCII"])
@given(text=st.text(alphabet="hel\x04\x13 é👩\U000f0000", max_size=20))
def test_a_vocabulary_may_lack_characters(lacks: str, text: str) -> None:
    """As SmolLM2 lacks some bytes: they are no tokens at all, and a longer text may fit."""
    state = json.loads(BYTE_LEVEL._backend.to_str())
    if lacks == "what is not ASCII":
        state["pre_tokenizer"] = None
    else:
        [(spelled, _)] = pre_tokenizers.ByteLevel(False).pre_tokenize_str("\x04\x13" if lacks == "controls" else "\x80")
        state["model"]["merges"] = []
        for char in spelled:
            del state["model"]["vocab"][char]
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(state)))
    assert tokenizer.least_tokens(text * 500) <= len(tokenizer.encode(text * 500, add_special_tokens=False))
    assert (tokenizer.least_tokens("x" * 100_000) > 0) == (lacks == "controls")


@given(token_ids=st.lists(st.integers(0, BYTE_LEVEL.vocab_size - 1), max_size=60))
def test_any_tokens_of_a_byte_level_vocabulary(token_ids: list[int]) -> None:
    """Models may also write bytes that are no text."""
    assert "".join(pieces(BYTE_LEVEL, token_ids)) == BYTE_LEVEL.decode(token_ids, skip_special_tokens=True)


def test_prompt_decides_the_leading_space() -> None:
    prompt = BYTE_FALLBACK.encode("the ship", add_special_tokens=False)
    world = BYTE_FALLBACK.encode("world", add_special_tokens=False)
    assert "".join(pieces(BYTE_FALLBACK, world, prompt)) == " world"
    assert "".join(pieces(BYTE_FALLBACK, world)) == "world"


def test_special_tokens() -> None:
    token_ids = BYTE_LEVEL.encode("hello<|end|> world", add_special_tokens=False)
    assert "".join(pieces(BYTE_LEVEL, token_ids)) == "hello world"
    shown = IncrementalDetokenizer(BYTE_LEVEL, [], skip_special_tokens=False)
    assert "".join(map(shown.push, token_ids)) == "hello<|end|> world"


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_endless_invalid_bytes_are_given_out(tokenizer: Tokenizer) -> None:
    """Nothing is held back for ever, and what comes after them is whole again."""
    [invalid] = [i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == b"\xff"]
    detokenizer = IncrementalDetokenizer(tokenizer, [])
    shown = "".join(detokenizer.push(invalid) for _ in range(300))
    assert len(shown) > 200
    rest = "".join(map(detokenizer.push, tokenizer.encode("the ship", add_special_tokens=False)))
    assert rest.endswith("the ship")


def test_token_bytes() -> None:
    for tokenizer in (BYTE_LEVEL, BYTE_FALLBACK):
        token_ids = tokenizer.encode("hello 你 👩 é!", add_special_tokens=False)
        assert b"".join(map(tokenizer.token_bytes, token_ids)).decode().strip() == "hello 你 👩 é!"
    [end] = BYTE_LEVEL.encode("<|end|>", add_special_tokens=False)
    assert BYTE_LEVEL.token_bytes(end) == b"<|end|>"
