"""Routing policies by name, imported when chosen. A new one: a module here, a line below."""

from __future__ import annotations

from importlib import import_module

from router.policies.base import Policy

POLICIES = {
    "prefix_aware": "router.policies.prefix_aware:PrefixAware",
    "power_of_two": "router.policies.power_of_two:PowerOfTwo",
    "round_robin": "router.policies.round_robin:RoundRobin",
    "least_loaded": "router.policies.least_loaded:LeastLoaded",
    "session": "router.policies.session:SessionAffinity",
}


DEFAULT_POLICY = "prefix_aware"


def make_policy(name: str) -> Policy:
    """A new instance of the policy. Raises KeyError for an unknown name (the config has checked it)."""
    module, _, class_name = POLICIES[name].partition(":")
    policy: Policy = getattr(import_module(module), class_name)()
    return policy
