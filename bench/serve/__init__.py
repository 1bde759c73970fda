"""Load on an OpenAI endpoint, ours or a peer's, measured from outside (``pdserve bench serve``).

    datasets, traces -> requests --+
    arrivals         -> moments  --+-> runner -> endpoint (aiohttp, SSE) -> records -> metrics -> report, plots

Requests are made one at a time, just before they are sent, so that memory does not grow with the length of a run.
"""
