"""Token ids in and out, draws with one seed, logprobs, a cancelled stream: python examples/token_ids.py [HOST:PORT]"""

import sys

import pdserve

with pdserve.Client(*sys.argv[1:2]) as client:
    info = client.model_info()
    print(f"{info.model}: up to {info.max_model_len} tokens")
    prompt = client.tokenize("The quick brown fox")

    answer = client.generate(prompt, n=3, seed=7, temperature=0.9, max_tokens=8)
    for choice in answer.choices:
        print(choice.index, choice.token_ids, repr(choice.text))

    answer = client.generate(prompt, temperature=0, max_tokens=1, logprobs=3)
    for top in answer.choices[0].logprobs[0].top:
        print(f"{top.logprob:7.3f} {top.token.decode(errors='replace')!r}")

    stream = client.stream(prompt, max_tokens=500, ignore_eos=True)
    for count, _ in enumerate(stream, start=1):
        if count == 5:
            stream.cancel()
            break
    print("cancelled; the workers have dropped it")
