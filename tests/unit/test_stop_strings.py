"""Stop strings against a plain oracle: whatever the pieces, the same text comes out, never a part of a stop string."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.stop_strings import StopStrings


def run(stop: list[str], pieces: list[str]) -> tuple[str, str | None]:
    watch = StopStrings(stop)
    shown = "".join(map(watch.push, pieces))
    return shown + watch.flush(), watch.matched


def oracle(stop: list[str], text: str) -> tuple[str, str | None]:
    """Character by character: the first end of a stop string, the longest of those."""
    for end in range(1, len(text) + 1):
        matching = [s for s in stop if text[:end].endswith(s)]
        if matching:
            longest = max(matching, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    stop=st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=4),
    pieces=st.lists(st.text("ab\n", max_size=5), max_size=12),
)
def test_same_as_the_oracle(stop: list[str], pieces: list[str]) -> None:
    assert run(stop, pieces) == oracle(stop, "".join(pieces))


@given(stop=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4), text=st.text("ab", max_size=30))
def test_what_is_shown_is_never_taken_back(stop: list[str], text: str) -> None:
    watch = StopStrings(stop)
    expected, _ = oracle(stop, text)
    shown = ""
    for char in text:
        shown += watch.push(char)
        assert expected.startswith(shown)


@pytest.mark.parametrize(
    ("stop", "pieces", "shown", "matched"),
    [
        (["END"], ["the ", "E", "N", "D", " more"], "the ", "END"),
        (["END"], ["the ", "E", "N", "d"], "the ENd", None),
        (["\n\n"], ["one\n", "\ntwo"], "one", "\n\n"),
        (["好的"], ["你好", "的"], "你", "好的"),
        (["abcd", "bc"], ["abcd"], "a", "bc"),
        ([], ["text"], "text", None),
    ],
)
def test_examples(stop: list[str], pieces: list[str], shown: str, matched: str | None) -> None:
    assert run(stop, pieces) == (shown, matched)


def test_text_is_held_only_while_undecided() -> None:
    watch = StopStrings(["stop"])
    assert watch.push("we s") == "we "
    assert watch.push("t") == ""
    assert watch.push("ay") == "stay"
