"""How hypothesis runs here: without limits of time, and with the same examples every time.

A slow or busy machine is no failure, so no example has a deadline; and a run that is to say whether a change may land
must not depend on luck. To look for what no run has found yet: ``make test ARGS="--hypothesis-profile=explore"``.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("repeatable", UNHURRIED, derandomize=True)
settings.register_profile("explore", UNHURRIED, print_blob=True)
settings.load_profile("repeatable")
