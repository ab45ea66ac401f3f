"""Runs programs, plain and on replicas, and prints a verdict for each; `table` writes docs/reference/programs.md.

python -m tests.programs [table | distribution] [STRATEGY...] [PART OF A PATH...]

With `distribution`, programs run unchanged, with several seeds; see `tests.programs.distribution`.
"""

import concurrent.futures
import datetime
import os
import sys

from tests.programs import distribution, running, table
from tests.programs.catalog import Program, programs

STRATEGIES = ("mirrored", "multiworker", "horovod")


def main(*words: str) -> int:
    strategies = [word for word in words if word in STRATEGIES] or [*STRATEGIES]
    parts = [word for word in words if word not in (*STRATEGIES, "table", "distribution")]
    chosen = [p for p in programs().values() if not parts or any(part in p.path for part in parts)]

    def run(program: Program) -> dict[str, str]:
        if "distribution" in words:
            found = distribution.verdicts(program, strategies) if distribution.applies(program) else {}
        else:
            found = running.verdicts(program, strategies)
        for strategy, verdict in found.items():
            print(f"{program.path}  {strategy}  {verdict}", flush=True)
        return found

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        verdicts = dict(zip([program.path for program in chosen], pool.map(run, chosen), strict=True))
    if "table" in words:
        table.write(verdicts, STRATEGIES, datetime.date.today())
    unexpected = [path for path, found in verdicts.items() if any(not running.is_good(v) for v in found.values())]
    print(f"{len(verdicts) - len(unexpected)} passed, {len(unexpected)} failed")
    return bool(unexpected)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
