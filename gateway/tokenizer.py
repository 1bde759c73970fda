"""The model's tokenizer: text to token ids and back, and the bytes of single tokens. Loads no torch.

Reads ``tokenizer.json`` with the ``tokenizers`` library. Pure functions after loading; safe to call from threads.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers


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
        backend = tokenizers.Tokenizer.from_file(str(path))
        backend.no_truncation()
        backend.no_padding()
        return cls(backend)

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


def _is_byte_level(decoder: Any) -> bool:
    """Whether the decoder (or one inside a sequence of decoders) is the byte-level one."""
    if decoder is None:
        return False

    def has_byte_level(state: dict[str, Any]) -> bool:
        return state.get("type") == "ByteLevel" or any(has_byte_level(part) for part in state.get("decoders", []))

    return has_byte_level(json.loads(decoder.__getstate__()))
