"""Which cells are run: of all combinations of state, fault, place and shape, a few in which every pair occurs.

Greedy, and the same every time: the combination that covers most of the pairs that no chosen one has is next, among
equals the one of the rarest values. Pairs that can occur in no cell at all (an abort has no place but the client) do
not count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, product
from typing import NamedTuple


class Cell(NamedTuple):
    state: str
    kind: str
    place: str
    shape: str

    def __str__(self) -> str:
        return "/".join(self)


Pair = tuple[int, str, int, str]


def pairs(cell: Cell) -> Iterator[Pair]:
    for i, j in combinations(range(len(cell)), 2):
        yield i, cell[i], j, cell[j]


def select(
    lists: Sequence[Sequence[str]], is_possible: Callable[[Cell], bool], given: Sequence[Cell] = ()
) -> list[Cell]:
    """Cells that together have every pair that any possible cell has; ``given`` are among them."""
    candidates = [cell for values in product(*lists) if is_possible(cell := Cell(*values))]
    missing = {pair for cell in candidates for pair in pairs(cell)}
    chosen = list(given)
    uses = Counter(value for cell in given for value in cell)
    missing.difference_update(pair for cell in given for pair in pairs(cell))
    while missing:
        best = max(
            candidates,
            key=lambda cell: (sum(pair in missing for pair in pairs(cell)), -sum(uses[value] for value in cell)),
        )
        missing.difference_update(pairs(best))
        uses.update(best)
        chosen.append(best)
    return chosen
