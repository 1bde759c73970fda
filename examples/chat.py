"""One chat through the SDK, streamed: python examples/chat.py [HOST:PORT] (the gateway's gRPC port)."""

import sys

import pdserve

messages = [{"role": "user", "content": "In one sentence, what is a lighthouse?"}]
with pdserve.Client(*sys.argv[1:2]) as client, client.stream_chat(messages, max_tokens=64, deadline_s=60) as stream:
    for chunk in stream:
        print(chunk.text, end="", flush=True)
    print(f"\n{stream.usage}")
