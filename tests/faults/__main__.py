"""``python -m tests.faults``: run the matrix, or a part of it, and keep the results; ``make test-faults``.

--only REGEX     cells whose name it finds         --shard 2/8   the second eighth of them
--results FILE   JSON lines, one a cell, appended  --table       write the results into docs/operations.md
--list           names only
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


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults")
    parser.add_argument("--only", default="")
    parser.add_argument("--shard", default="1/1")
    parser.add_argument("--results", type=Path)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--list", action="store_true")
    arguments = parser.parse_args()
    index, count = (int(part) for part in arguments.shard.split("/"))
    cells = [cell for cell in all_cells() if re.search(arguments.only, str(cell))][index - 1 :: count]
    if arguments.list:
        print("\n".join(map(str, cells)))
        return 0
    results = []
    model = prepare_default_model()
    started_s = time.monotonic()
    with running_fleet(Path(tempfile.mkdtemp(prefix="pdserve-faults-")), str(model)) as fleet:
        runner = Runner(fleet, reference(model))
        runner.warm_up()
        for number, cell in enumerate(cells, 1):
            result = runner.run(cell)
            results.append(result)
            line = f"{number}/{len(cells)} {result.verdict:11} {result.seconds:5.1f} s  {result.cell}: {result.ended}"
            print("\n    ".join([line, *result.problems]), flush=True)
            if arguments.results:
                with arguments.results.open("a") as file:
                    file.write(json.dumps(result.as_json()) + "\n")
    counts = {verdict: sum(r.verdict == verdict for r in results) for verdict in ("ok", "NOT REACHED", "FAILED")}
    print(f"{len(results)} cells in {time.monotonic() - started_s:.0f} s: {counts}")
    if arguments.table:
        kept = arguments.results.read_text().splitlines() if arguments.results else []
        write_table([Result(**json.loads(line)) for line in kept] or results)
    return 1 if counts["FAILED"] else 0


if __name__ == "__main__":
    sys.exit(main())
