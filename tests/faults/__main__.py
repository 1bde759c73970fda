"""``python -m tests.faults``: run the matrix, or a part of it, and keep the results; ``make test-faults``.

--only REGEX     cells whose name it finds         --seconds S   begin no new one after that
--results FILE   JSON lines, one a cell, appended  --resume      leave out those that are ok there
--list           names only                        --table       write the results into docs/operations.md
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from pathlib import Path

from pdserve.model_store import prepare_default_model
from tests.faults.cells import Result, Runner, all_cells
from tests.faults.fleet import running_fleet
from tests.faults.reference import reference
from tests.faults.table import write_table


def read(path: Path | None) -> list[Result]:
    """Results of earlier runs."""
    lines = path.read_text().splitlines() if path is not None and path.exists() else []
    return [Result(**json.loads(line)) for line in lines]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults")
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--results", type=Path)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--list", action="store_true")
    arguments = parser.parse_args()
    kept = read(arguments.results)
    done = {result.cell for result in kept if result.verdict == "ok"} if arguments.resume else set()
    cells = [cell for cell in all_cells() if re.search(arguments.only, str(cell)) and str(cell) not in done]
    if arguments.list:
        print("\n".join(map(str, cells)))
        return 0
    results: list[Result] = []
    model = prepare_default_model()
    started_s = time.monotonic()
    with running_fleet(Path(tempfile.mkdtemp(prefix="pdserve-faults-")), str(model)) as fleet:
        runner = Runner(fleet, reference(model))
        runner.warm_up()
        for number, cell in enumerate(cells, 1):
            if time.monotonic() - started_s > arguments.seconds:
                break
            result = runner.run(cell)
            results.append(result)
            line = f"{number}/{len(cells)} {result.verdict:11} {result.seconds:5.1f} s  {result.cell}: {result.ended}"
            print("\n    ".join([line, *result.problems]), flush=True)
            if arguments.results:
                with arguments.results.open("a") as file:
                    file.write(json.dumps(result.as_json()) + "\n")
    counts = {verdict: sum(r.verdict == verdict for r in results) for verdict in ("ok", "NOT REACHED", "FAILED")}
    print(f"{len(results)} cells in {time.monotonic() - started_s:.0f} s: {counts}; logs: {fleet.directory}*")
    if arguments.table and not arguments.only:  # a part of the cells is not the table
        write_table(kept + results)
    return 1 if counts["FAILED"] else 0


if __name__ == "__main__":
    sys.exit(main())
