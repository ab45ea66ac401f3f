"""What the first step of each program in tests/programs needs of the rows of a batch, besides a replica's own.

python docs/generate/steps_of_programs.py    # writes the section of docs/reference/programs.md; takes minutes

Each program runs in a process of its own until its first step is explained, as by `tfdist explain`.
"""

import collections
import concurrent.futures
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING, NamedTuple

from tfdist.errors import count_of

if TYPE_CHECKING:
    from tfdist.row_semantics.explanation import Explanation

ROOT = pathlib.Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "programs.md"
BEGIN, END = "<!-- steps: written by docs/generate/steps_of_programs.py -->\n", "<!-- end of steps -->\n"
VERDICTS = ("proved", "sums", "rows gathered", "whole batch", "refused")  # from good to bad


class Finding(NamedTuple):
    """What a step needs.

    Attributes:
      verdict: one of `VERDICTS`.
      detail: what replicas communicate besides what any training does, or why each computes the whole batch.
      reason: why it is not proved; empty if it is.
      types_without_rule: types of operations without a rule.
    """

    verdict: str
    detail: str = ""
    reason: str = ""
    types_without_rule: tuple[str, ...] = ()

    @classmethod
    def of(cls, explanation: "Explanation") -> "Finding":
        """Returns what follows from an explanation of a step."""
        types_without_rule = tuple(sorted(explanation.types_without_rule))
        bad = [value.sentence for value in explanation.values if not value.op]
        reason, communication = bad[0] if bad else explanation.reason, explanation.communication
        if not reason or communication is None:
            sent = "what it gathers itself" if explanation.calls else ""
            return cls("whole batch" if reason else "proved", sent, reason, types_without_rule)
        if communication.obstacle:
            return cls("whole batch", f"the whole batch: {communication.obstacle}", reason, types_without_rule)
        sums, rows = communication.count("all_reduce"), communication.count("all_gather")
        detail = [count_of(sums, "sum")] * bool(sums) + [f"rows of {count_of(rows, 'tensor')}"] * bool(rows)
        return cls("rows gathered" if rows else "sums", ", ".join(detail), reason, types_without_rule)

    @property
    def row(self) -> str:
        """The last cells of a row of a table."""
        operation = re.search(r"together, by (\w+) ", self.reason)
        decided = f"`{operation[1]}`" if operation else self.reason.partition(". ")[0][:160]
        return f"| {self.detail} | {decided} | {', '.join(f'`{kind}`' for kind in self.types_without_rule)} |"


def _run(script: str) -> None:
    """Runs a program until its first step, and prints what that needs."""
    from tfdist import explain
    from tfdist.row_semantics import explanation

    def tell(found: "Explanation") -> None:
        print("\nSTEP", json.dumps([found.step.partition(" ")[0], *Finding.of(found)]), flush=True)
        raise SystemExit

    with explanation.using_listener(tell):
        explain._run_script(script, ())


def _steps(path: str) -> list[tuple[str, Finding]]:
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
        command = [sys.executable, __file__, str(ROOT / "tests" / "programs" / path)]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
    rows = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("STEP ")]
    found = [(step, Finding(*rest[:3], tuple(rest[3]))) for step, *rest in rows]
    if done.returncode:
        lines = [line.strip() for line in done.stderr.replace(f"{ROOT}/", "").splitlines() if "Error: " in line]
        found.append(("", Finding("refused", reason=lines[-1] if lines else str(done.returncode))))
    return found


def table() -> str:
    """Returns the section of the page."""
    sys.path.append(str(ROOT))
    from tests.programs.catalog import programs

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        found = dict(zip(programs(), pool.map(_steps, programs()), strict=True))
    trained = {path: steps for path, steps in found.items() if steps}
    worst = {path: max(steps, key=lambda each: VERDICTS.index(each[1].verdict)) for path, steps in trained.items()}
    counts = collections.Counter(each.verdict for _, each in worst.values())
    unknown = [path for path, steps in trained.items() if any(each.types_without_rule for _, each in steps)]
    rows = [f"| `{path}` | {step} {each.row}" for path, (step, each) in worst.items() if each.verdict != "proved"]
    said = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])
    return "\n".join(
        [
            f"{len(trained)} programs call Keras's methods; their first steps: {said}. {len(unknown)} have an "
            "operation without a rule.\n",
            "| program | step | communicated | decided by | without a rule |",
            "| --- | --- | --- | --- | --- |",
            *rows,
            "",
        ]
    )


if __name__ == "__main__":
    if sys.argv[1:]:
        _run(sys.argv[1])
    else:
        written = table()
        before, after = PAGE.read_text("utf-8").split(BEGIN)
        PAGE.write_text(before + BEGIN + written + END + after.partition(END)[2], "utf-8")
