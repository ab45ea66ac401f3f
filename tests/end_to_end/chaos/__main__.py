"""Interrupts runs of every strategy at random, and holds their ends against runs that nobody interrupts: `make chaos`.

python -m tests.end_to_end.chaos --seeds=100
"""

import argparse
import pathlib
import shutil
import sys
import tempfile
from typing import TYPE_CHECKING

from tests.end_to_end.chaos.settings import SETTINGS
from tfdist.cluster.quiet_tensorflow import load_tensorflow

if TYPE_CHECKING:
    from tests.end_to_end.chaos.campaign import Outcome


def main() -> int:
    """Prints a line for each seed, and the table; returns whether there was any difference."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.end_to_end.chaos", description=__doc__.partition(":")[0] + "."
    )
    parser.add_argument("--seeds", type=int, default=100, help="for each strategy (default: 100)")
    parser.add_argument("--first", type=int, default=0, help="the first seed, to repeat one (default: 0)")
    parser.add_argument("--strategies", default=",".join(SETTINGS), help=f"of {', '.join(SETTINGS)}; by default all")
    said = parser.parse_args()
    load_tensorflow()  # without the messages of TensorFlow's own import
    from tests.end_to_end.chaos.campaign import outcome, reference, table

    home = pathlib.Path(tempfile.mkdtemp(prefix="chaos-"))
    outcomes: list[tuple[str, Outcome]] = []
    for name in said.strategies.split(","):
        against = reference(SETTINGS[name], home)
        for seed in range(said.first, said.first + said.seeds):
            made = outcome(SETTINGS[name], seed, home, against)
            outcomes.append((name, made))
            print(_line(name, seed, made), flush=True)
            for path in home.glob(f"{name}-{seed}*") if not made.problems else ():
                shutil.rmtree(path)
    print(f"\n{table(outcomes)}")
    wrong = any(made.problems for _, made in outcomes)
    print(f"What was different is in {home}." if wrong else "No difference.")
    if not wrong:
        shutil.rmtree(home)
    return int(wrong)


def _line(name: str, seed: int, made: "Outcome") -> str:
    ends = " ".join(f"{seconds:.1f}" for seconds in made.ends)
    problems = "".join(f"\n  {problem}" for problem in made.problems)
    return f"{name} seed {seed}: fell {' '.join(made.falls)}, ended {ends} s after, {made.seconds:.0f} s{problems or ', same'}"


if __name__ == "__main__":
    sys.exit(main())
