"""Replays traces of requests against simulated workers, with the router's real policies and prefix index.

trace.py       where requests come from: Mooncake traces, made-up conversations
worker.py      a simulated worker: the engine's real block pool, and times instead of work
simulation.py  the clock, and the way of a request: place, prefill, send, decode
report.py      what came out, as a table and as JSON
memory.py      what a block costs in the index
    feed_cost.py   what following the streams of many workers costs a router (needs a Redis)
"""
