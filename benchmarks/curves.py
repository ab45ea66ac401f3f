"""A language model's learning curve under several meshes: the same one.

    python benchmarks/curves.py -- "--mesh_shape=data:4" "--mesh_shape=data:1;model:4 --layout=heads:model;ffn:model"

Each side is flags of `tfdist train` in addition to those that all have. Prints a Markdown table: bits a byte on
held-out text at each evaluation, the largest difference from the first side, and the minutes that training took.
"""

import argparse
import json
import math
import pathlib
import shlex
import subprocess
import sys
import tempfile
import time

COMMON = (
    "--strategy=mesh",
    "--model=transformer(layers=2, width=128, heads=4)",
    "--dataset=text(length=128)",
    "--batch_size=32",
    "--optimizer=adamw(weight_decay=0.01)",
    "--learning_rate=0.003",
    "--warmup_steps=100",
    "--decay=cosine",
    "--log_every=100",
)


def curve(flags: list[str], steps: int) -> tuple[dict[int, float], float]:
    """Trains once; returns bits a byte by step, and minutes."""
    with tempfile.TemporaryDirectory() as folder:
        run = pathlib.Path(folder, "run")
        own = [f"--steps={steps}", f"--eval_every={steps // 5}", f"--output_dir={run}"]
        started = time.monotonic()
        subprocess.run(
            [sys.executable, "-m", "tfdist.train", *COMMON, *own, *flags], check=True, stdin=subprocess.DEVNULL
        )
        minutes = (time.monotonic() - started) / 60
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {record["step"]: record["loss"] / math.log(2) for record in records if record["kind"] == "eval"}, minutes


def main(steps: int, sides: list[str]) -> None:
    """Trains every side and prints the table."""
    curves = [curve(shlex.split(side), steps) for side in sides]
    first = curves[0][0]
    print("| side | " + " | ".join(f"step {step}" for step in first) + " | largest difference | minutes |")
    print("| --- |" + " --- |" * (len(first) + 2))
    for side, (bits, minutes) in zip(sides, curves, strict=True):
        difference = max(abs(bits[step] - first[step]) for step in first)
        cells = [f"{bits[step]:.4f}" for step in first]
        print(f"| `{side}` | " + " | ".join(cells) + f" | {difference:.1e} | {minutes:.1f} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("sides", nargs="+")
    given = parser.parse_args()
    main(given.steps, given.sides)
