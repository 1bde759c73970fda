"""An engine process without an engine, as worker/engine_client starts it: speaks engine.messages, knows no model.

Draws the tokens 1, 2, 3 ...; some first prompt tokens make it misbehave. Frames come back as they are.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import msgspec
import zmq

from engine.messages import (
    AbortRequests,
    AddRequest,
    EngineFailed,
    EngineReady,
    EngineStats,
    FinishReason,
    FromEngine,
    PeerFrame,
    RequestOutput,
    StepOutputs,
    Timings,
    ToEngine,
)
from worker.launch import decode_launch

EXIT, HANG, GARBAGE, NEVER_ENDS = 901, 902, 903, 904


def ready() -> EngineReady:
    return EngineReady(
        model_fingerprint="m",
        vocab_size=1000,
        max_model_len=1024,
        block_size=16,
        hash_block_tokens=16,
        num_blocks=8,
        num_layers=1,
        num_kv_heads=1,
        head_dim=8,
        kv_dtype="float32",
        kv_bytes=1,
        eos_token_ids=[0],
    )


def main() -> None:
    launch = decode_launch(sys.argv[1])
    context = zmq.Context()
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    inbox.connect(launch.to_engine)
    outbox.connect(launch.from_engine)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    encode = msgspec.msgpack.Encoder().encode
    decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)

    def say(message: FromEngine) -> None:
        outbox.send(encode(message))

    model = launch.engine_options["model"]
    if model == "broken":
        say(EngineFailed("no such model: use another --model"))
        time.sleep(0.2)
        sys.exit(1)
    if model == "mute":
        time.sleep(60)
    say(ready())
    aborted = 0
    while True:
        if not inbox.poll(100):
            if os.getppid() != launch.parent_pid:
                os._exit(1)
            say(StepOutputs(stats=EngineStats(running=aborted, total_blocks=8, free_blocks=6, cached_blocks=2)))
            continue
        message = decoder.decode(inbox.recv())
        match message:
            case AddRequest():
                answer(message, say, outbox)
            case AbortRequests(request_ids):
                aborted += len(request_ids)
                say(
                    StepOutputs(
                        [RequestOutput(request_id=name, finish_reason=FinishReason.ABORT) for name in request_ids]
                    )
                )
            case PeerFrame(peer, payload):
                say(PeerFrame(peer, payload))


def answer(message: AddRequest, say: object, outbox: zmq.Socket[bytes]) -> None:
    assert callable(say)
    first = message.prompt_token_ids[0]
    if first == EXIT:
        os._exit(3)
    if first == HANG:
        time.sleep(60)
    if first == GARBAGE:
        outbox.send(b"\xc1 is no msgpack")
    if first == NEVER_ENDS:
        return
    last = message.sampling.max_tokens
    for n in range(1, last + 1):
        output = RequestOutput(request_id=message.request_id, token_ids=[n])
        if n == 1:
            output.timings = Timings(prefill_s=0.5)
            output.cached_tokens = 3
        if n == last:
            output.finish_reason = FinishReason.LENGTH
        say(StepOutputs([output]))


if __name__ == "__main__":
    main()
