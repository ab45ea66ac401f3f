"""Paired comparisons of step times: both sides alternate, so that a drift of the machine's speed meets both.

    python benchmarks/compare.py [--pairs=7] [--steps=40] [COMPARISON...]

Prints, for each comparison, the median step time of each side, the median of the ratios pair by pair and its
interval: the range of the ratios without the smallest and the largest, 87.5% confidence for 7 pairs.
"""

import argparse
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys

from tfdist.testing import processes

SIDE = str(pathlib.Path(__file__).with_name("side.py"))
BIN = pathlib.Path(sys.executable).parent
# name -> (ours, theirs): each a side and how its processes are started.
COMPARISONS = {
    "single": (("tfdist", "one"), ("bare", "one")),
    "horovod": (("tfdist", "horovodrun"), ("horovod_by_hand", "horovodrun")),
    "multiworker": (("tfdist", "TF_CONFIG"), ("multiworker_by_hand", "TF_CONFIG")),
    "floor": (("tfdist", "horovodrun"), ("floor", "horovodrun")),
}


def run(side: str, start: str, steps: int) -> float:
    """Milliseconds of a median step of one side."""
    command = [sys.executable, SIDE, side, str(steps)]
    if start == "TF_CONFIG":
        with processes.job(command, 2) as job:
            ended = job.wait(180)
        output, code = ended[0].output, max(end.code for end in ended)
    else:
        prefix = [str(BIN / "horovodrun"), "-np", "2", "--gloo"] if start == "horovodrun" else []
        ended_ = subprocess.run(
            prefix + command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=180, check=False
        )
        output, code = ended_.stdout + ended_.stderr, ended_.returncode
    found = re.findall(r"RESULT ([\d.]+)", output)
    if not found:
        raise SystemExit(f"{side} under {start} ended with code {code}:\n{output[-3000:]}")
    return float(found[0])


def compare(name: str, pairs: int, steps: int) -> dict:
    """Runs both sides in turn, one more pair than asked for: the first warms the machine up."""
    ours, theirs = COMPARISONS[name]
    timed = [(run(*ours, steps), run(*theirs, steps)) for _ in range(pairs + 1)][1:]
    ratios = sorted(a / b for a, b in timed)
    return {
        "comparison": name,
        "ours_ms": round(statistics.median(a for a, _ in timed), 2),
        "theirs_ms": round(statistics.median(b for _, b in timed), 2),
        "ratio": round(statistics.median(ratios), 3),
        "interval": [round(ratios[1], 3), round(ratios[-2], 3)],
        "pairs": pairs,
        "cores": os.cpu_count(),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("comparisons", nargs="*", default=list(COMPARISONS), metavar="COMPARISON")
    arguments = parser.parse_args()
    for chosen in arguments.comparisons:
        print(json.dumps(compare(chosen, arguments.pairs, arguments.steps)), flush=True)
