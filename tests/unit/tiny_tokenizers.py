"""Two small tokenizers, built here: byte-level as GPT-2 and Llama 3 have it, and one with byte fallback as Llama 2."""

from __future__ import annotations

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from gateway.tokenizer import Tokenizer

SPECIAL = ["<|end|>", "<|user|>"]
WORDS = ["the", " the", " ship", "he", "ll", "hello", " world", "Par", "is", " Paris", "ing", "stop", "  ", "\n\n"]


def byte_level() -> Tokenizer:
    """Every byte, and a few words that merge."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    for word in [*WORDS, "é", "你", "👩"]:
        spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(word)[0][0]
        if word == "👩":
            spelled = spelled[:2]  # a merge that ends within a character
        left = spelled[0]
        for char in spelled[1:]:
            if left + char not in vocab:
                vocab[left + char] = len(vocab)
                merges.append((left, char))
            left += char
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    return Tokenizer(backend)


def byte_fallback() -> Tokenizer:
    """Letters and words with ▁ for a space; whatever is not there is spelled in bytes."""
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": 1 + byte for byte in range(256)}
    for char in "▁abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,!?'0123456789é":
        vocab[char] = len(vocab)
    merges: list[tuple[str, str]] = []
    for word in ("▁the", "▁ship", "hello", "▁world"):
        left = word[0]
        for char in word[1:]:
            if left + char not in vocab:
                vocab[left + char] = len(vocab)
                merges.append((left, char))
            left += char
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(SPECIAL)
    return Tokenizer(backend)
