"""What ``bench.gpu_serve`` sends: Poisson arrivals, and recorded traces at a stretch or at a share of what is carried.

Owns the words of ``--loads`` and what they are as flags of ``bench.serve``; and the capacity, the rate at which a
saturated cluster completes a trace's requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.serve.traces import TraceEntry, read_azure, read_mooncake, spread

MAX_INPUT_TOKENS = 32_768
BURST_TOKENS = 250_000
"""Input of a burst, for each GPU: about 6 s of prefill of an 8B model on an H200."""
_BURST_STRETCH = 1e-6
_READERS = {"mooncake": read_mooncake, "azure": read_azure}


@dataclass(frozen=True, slots=True)
class Load:
    """Something that ``bench.serve`` sends."""

    name: str
    flags: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """Those of a trace's requests that fit, in the order in which they came."""

    kind: str
    file: str
    entries: list[TraceEntry]

    @classmethod
    def read(cls, kind: str, file: str) -> Trace:
        """Raises ValueError."""
        fitting = [entry for entry in _READERS[kind](Path(file)) if entry.input_tokens <= MAX_INPUT_TOKENS]
        if len(fitting) < 2:
            raise ValueError(f"{file}: fewer than two requests of at most {MAX_INPUT_TOKENS} tokens")
        return cls(kind, file, sorted(fitting, key=lambda entry: entry.arrival_s))

    def stretched(self, stretch: float, seconds: float) -> Load:
        """What came within ``seconds`` / ``stretch`` of it."""
        first_s = self.entries[0].arrival_s
        count = sum(1 for entry in self.entries if (entry.arrival_s - first_s) * stretch < seconds)
        return self._load(f"{self.kind} x{stretch:g}, {count / seconds:.1f}/s", count, stretch)

    def at_share(self, share: float, capacity: float, seconds: float) -> Load:
        """Stretched so that in the mean ``share`` of ``capacity`` (requests/s) arrives, for about ``seconds``; those of
        one moment come evenly until the next: Mooncake's moments are 3 s apart, which stretches into long pauses.

        Raises ValueError: the trace is too short for that.
        """
        rate = share * capacity
        count = max(8, round(rate * seconds))
        if count >= len(self.entries):
            raise ValueError(f"{self.file} has {len(self.entries)} requests, {rate:.1f}/s for {seconds:g} s are more")
        recorded = spread(self.entries)
        recorded_s = recorded[count].arrival_s - recorded[0].arrival_s
        stretch = count / rate / recorded_s
        return self._load(f"{self.kind} at {share:.0%}, {rate:.1f}/s", count, stretch, "--trace-spread")

    def burst(self, gpus: int) -> Load:
        """The first of them all at once, enough to keep so many GPUs busy for some seconds."""
        count = tokens = 0
        while count < len(self.entries) and tokens < gpus * BURST_TOKENS:
            tokens += self.entries[count].input_tokens
            count += 1
        return self._load(f"{self.kind}, all at once", count, _BURST_STRETCH)

    def _load(self, name: str, count: int, stretch: float, *more: str) -> Load:
        flags = ("--dataset-name", self.kind, "--num-prompts", str(count), "--dataset-path", self.file)
        return Load(name, (*flags, "--time-stretch", f"{stretch}", "--max-input-tokens", f"{MAX_INPUT_TOKENS}", *more))


def parse(text: str, seconds: float) -> Load | Trace:
    """``poisson:INPUT:OUTPUT:RATE``, ``mooncake:FILE:STRETCH``, ``azure:FILE:STRETCH``; without a stretch the trace. A
    further ``:SECONDS`` after a rate is in place of ``seconds``.

    Raises ValueError.
    """
    match text.split(":"):
        case ["poisson", input_len, output_len, rate, *rest] if len(rest) <= 1:
            count = max(1, round(float(rate) * (float(rest[0]) if rest else seconds)))
            flags = ("--random-input-len", input_len, "--random-output-len", output_len, "--request-rate", rate)
            return Load(f"{input_len} -> {output_len}, {rate}/s", ("--num-prompts", str(count), *flags))
        case ["mooncake" | "azure" as kind, file, stretch]:
            return Trace.read(kind, file).stretched(float(stretch), seconds)
        case ["mooncake" | "azure" as kind, file]:
            return Trace.read(kind, file)
    raise ValueError(
        f"load {text!r}: use poisson:INPUT:OUTPUT:RATE[:SECONDS], mooncake:FILE:STRETCH or azure:FILE:STRETCH; "
        "a trace without a stretch is sent at --share of the capacity"
    )


def capacity(result: dict[str, Any]) -> float:
    """Requests/s that a burst's cluster completed, from its start until nine tenths were.

    So the time in which the longest outputs run alone does not count. That in which the batch fills does, which makes
    it too low: simulated, a burst of ``BURST_TOKENS`` shows four fifths of what an engine carries of Azure's code
    trace, and two thirds of Mooncake's conversations, whose outputs are long. Without it, it is far too high where
    outputs are short: prompts that were read one after the other are then answered all at once, when nothing is left to
    read. Raises ValueError.
    """
    ends_s = sorted(each["last_s"] for each in result["requests"] if each["outcome"] == "ok")
    if len(ends_s) < 0.9 * len(result["requests"]) or len(ends_s) < 10:
        raise ValueError(f"of {len(result['requests'])} requests {len(ends_s)} were answered: no capacity to be seen")
    count = len(ends_s) * 9 // 10
    return float(count / ends_s[count - 1])
