"""The model's tokenizer: text to token ids and back, and the bytes of single tokens. Loads no torch.

Reads ``tokenizer.json`` with the ``tokenizers`` library. Pure functions after loading; safe to call from threads.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

MAX_COMPOSED = 4
"""Characters that NFC makes one of, at most."""


class Tokenizer:
    """One loaded tokenizer."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._added = {i: token.content for i, token in backend.get_added_tokens_decoder().items()}
        self._byte_of_char = _byte_level_alphabet() if _is_byte_level(backend.decoder) else None
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        """Raises ValueError, with the remedy, when the directory has no usable tokenizer."""
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ValueError(
                f"{directory} has no tokenizer.json: save a fast one there with "
                "transformers.AutoTokenizer.from_pretrained(...).save_pretrained(...)"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more special
            raise ValueError(f"{path} cannot be read ({error}): fetch the model again") from error
        backend.no_truncation()
        backend.no_padding()
        return cls(backend)

    @property
    def max_chars_per_token(self) -> int | None:
        """No token stands for more characters of a text; None where that is not known."""
        return None if self._text_limits is None else self._text_limits[0]

    def least_tokens(self, text: str) -> int:
        """It has at least so many tokens: known without tokenizing it."""
        if self._text_limits is None:
            return 0
        max_chars_per_token, vanishing = self._text_limits
        return (len(text) - sum(map(text.count, vanishing))) // max_chars_per_token

    @cached_property
    def _text_limits(self) -> tuple[int, str] | None:
        """How many characters a token stands for at most, and which ones become none; None where that is not known."""
        state = json.loads(self._backend.to_str())
        vanishing = _vanishing(state)
        if vanishing is None:
            return None
        longest = max(map(len, self._backend.get_vocab(with_added_tokens=True)))
        composes = '"type":"NFC"' in json.dumps(state["normalizer"], separators=(",", ":"))
        return longest * (MAX_COMPOSED if composes else 1), vanishing

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Bytes that are not UTF-8 become U+FFFD."""
        return str(self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def token(self, token_id: int) -> str:
        """The token as the vocabulary spells it; empty for an id that it does not have."""
        return self._backend.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes:
        """What the token stands for, exactly; a character may be spread over several tokens."""
        if (added := self._added.get(token_id)) is not None:
            return added.encode()
        token = self.token(token_id)
        if self._byte_of_char is not None:
            return b"".join(self._byte_of_char.get(char, char.encode()) for char in token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        return token.replace("▁", " ").encode()


def _byte_level_alphabet() -> dict[str, bytes]:
    """The printable character that byte-level vocabularies (GPT-2, 2019) write for each byte, inverted."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): bytes([byte]) for byte in printable}
    return alphabet | {chr(256 + n): bytes([byte]) for n, byte in enumerate(others)}


def _vanishing(state: dict[str, Any]) -> str | None:
    """The characters that a tokenizer with this ``tokenizer.json`` turns into no token. None where that is not known:
    unless all of its steps are among those that are known to keep each one, and its model has a token for it."""

    def steps(part: dict[str, Any] | None) -> list[dict[str, Any]]:
        if part is None:
            return []
        parts: list[dict[str, Any]] = part.get("normalizers", part.get("pretokenizers", []))
        return [step for inner in parts for step in steps(inner)] if part["type"] == "Sequence" else [part]

    def keeps(step: dict[str, Any]) -> bool:
        match step:
            case {"type": "ByteLevel" | "Digits" | "Metaspace" | "NFC" | "Prepend"}:
                return True
            case {"type": "Split", "behavior": behavior}:
                return bool(behavior != "Removed")
            case {"type": "Replace", "pattern": {"String": pattern}, "content": content}:
                return len(content) >= len(pattern)
        return False

    all_steps = steps(state["normalizer"]) + steps(state["pre_tokenizer"])
    swallows = any(token["lstrip"] or token["rstrip"] for token in state["added_tokens"])
    model = state["model"]
    if swallows or not all(map(keeps, all_steps)) or model["type"] != "BPE":
        return None
    vocab = model["vocab"]
    if model.get("byte_fallback") and all(f"<0x{byte:02X}>" in vocab for byte in range(256)):
        return ""
    if model.get("unk_token") in vocab and not model.get("fuse_unk"):
        return ""
    has_affixes = model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
    kinds = {step["type"] for step in all_steps}
    if has_affixes or "ByteLevel" not in kinds:
        return None
    # Byte-level vocabularies may lack bytes that their training did not see: SmolLM2 has no U+0004. A character of
    # several bytes has one, at least, that other characters have, too.
    lacking = {byte[0] for char, byte in _byte_level_alphabet().items() if char not in vocab}
    vanishing = "".join(chr(byte) for byte in sorted(lacking) if byte < 0x80)
    is_known = lacking.isdisjoint(range(0x80, 0xC0)) and not (vanishing and "Replace" in kinds)
    return vanishing if is_known else None


def _is_byte_level(decoder: Any) -> bool:
    """Whether the decoder (or one inside a sequence of decoders) is the byte-level one."""
    if decoder is None:
        return False

    def has_byte_level(state: dict[str, Any]) -> bool:
        return state.get("type") == "ByteLevel" or any(has_byte_level(part) for part in state.get("decoders", []))

    return has_byte_level(json.loads(decoder.__getstate__()))
