"""Many prompts at once with asyncio, each with a deadline: python examples/many_at_once.py [HOST:PORT]

What they share (the instruction) is computed once; ``cached_tokens`` shows it.
"""

import asyncio
import sys

import pdserve

INSTRUCTION = "You are a terse geographer. Answer with the name of one city and nothing else, in English. "
COUNTRIES = ("France", "Italy", "Japan", "Egypt")


async def ask(client: pdserve.AsyncClient, country: str) -> None:
    messages = [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": f"The capital of {country}?"}]
    try:
        answer = await client.chat(messages, temperature=0, max_tokens=16, deadline_s=60)
    except pdserve.OverloadedError as error:
        print(f"{country}: too busy, again in {error.retry_after_s:g} s")
    except pdserve.DeadlineExceededError:
        print(f"{country}: not in time")
    else:
        print(f"{country}: {answer.text} ({answer.usage.cached_tokens} of {answer.usage.prompt_tokens} tokens cached)")


async def main() -> None:
    async with pdserve.AsyncClient(*sys.argv[1:2]) as client:
        await ask(client, COUNTRIES[0])
        await asyncio.gather(*(ask(client, country) for country in COUNTRIES[1:]))


asyncio.run(main())
