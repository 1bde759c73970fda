"""What ``up`` tells the user when it cannot go on."""

from __future__ import annotations


class UpError(Exception):
    """One line that says what is wrong and names the remedy; ``up`` prints it and exits with 1."""
