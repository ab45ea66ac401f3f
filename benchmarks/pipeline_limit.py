"""Memory of each process of a pipeline by phase, for a model that one process could not train; also under a limit.

    python benchmarks/pipeline_limit.py                          # 400 million parameters with AdamW
    python benchmarks/pipeline_limit.py --layers=8 --launcher=horovod
    python benchmarks/pipeline_limit.py --launcher=horovod --budget=3072M     # each process in a control group: needs root
    python benchmarks/pipeline_limit.py --processes=1 --layers=8 --limit_mib=1600

The model is a transformer of `layers * 12 * width ** 2` parameters. The table has, for each phase, the peak of anonymous
resident memory in each process in MiB, and in the last column the private writable memory at its end, which `--limit_mib`
limits (RLIMIT_DATA, `ulimit -d`). The latter also has what is not resident: the stacks of threads, of which TensorFlow's
server starts about a hundred, and what the allocator keeps. On Linux alone.
"""

import argparse
import json
import pathlib
import re
import resource
import subprocess
import sys
import tempfile
from typing import Any

import numpy as np
from pipelined import RESULT

MIB = 2**20
TOKENS, VOCABULARY, ROWS = 32, 256, 4  # rows of a micro-batch
PHASES = ("start", "model", "trainer", "optimizer", "first step", "steps", "checkpoint", "model.keras", "resume")


class Phases:
    """The peak of this process's memory in each phase."""

    def __init__(self) -> None:
        self.found: list[tuple[float, float]] = []

    def end(self) -> None:
        """Notes the peak since the phase before: of resident memory that is not of files, and the counted memory now."""
        status = pathlib.Path("/proc/self/status").read_text()
        kib = {name: int(re.search(rf"{name}:\s+(\d+)", status)[1]) for name in ("VmHWM", "RssFile", "VmData")}
        self.found.append(((kib["VmHWM"] - kib["RssFile"]) / 1024, kib["VmData"] / 1024))
        print(f"{PHASES[len(self.found) - 1]}: {self.found[-1]}", kib["VmHWM"] - kib["RssFile"], flush=True)
        pathlib.Path("/proc/self/clear_refs").write_text("5")


def rank_program(given: argparse.Namespace) -> None:
    """Trains in one of the processes; the first one prints results."""
    if given.limit_mib:
        resource.setrlimit(resource.RLIMIT_DATA, (given.limit_mib * MIB,) * 2)
    import keras

    import tfdist
    from tfdist.models import build

    phases = Phases()
    options = {"micro_batches": given.micro_batches, "intra_op_threads": 1} if given.processes > 1 else {}
    strategy = tfdist.load_strategy("pipeline" if given.processes > 1 else "single", **options)
    phases.end()
    rows = given.micro_batches * ROWS
    x = np.random.default_rng(0).integers(0, VOCABULARY, (rows, TOKENS)).astype("int32")
    with strategy.scope():
        model = build(f"transformer(layers={given.layers},width={given.width},heads=8)", (TOKENS,), VOCABULARY)
        phases.end()
        trainer = tfdist.Trainer(model, optimizer=keras.optimizers.AdamW(1e-4), loss=_loss())
    phases.end()
    directory = pathlib.Path(given.directory)
    plain = {"batch_size": rows, "schedule": tfdist.Schedule(steps_per_call=1), "verbose": 0}
    trainer.build((x, x))
    phases.end()
    trainer.fit(x, x, steps=1, **plain)
    phases.end()
    trainer.fit(x, x, steps=1 + given.steps, **plain)
    phases.end()
    saved = tfdist.Checkpoints(directory=str(directory / "checkpoints"), every=1, in_background=False)
    trainer.fit(x, x, steps=3 + given.steps, checkpoints=saved, **plain)
    phases.end()
    trainer.save(directory / "model.keras")
    phases.end()
    trainer.resume(directory / "checkpoints")
    phases.end()
    everyone = strategy.group.gather("phases", phases.found, 600)
    if strategy.is_chief:
        sizes = {"file": (directory / "model.keras").stat().st_size / MIB, "parameters": _parameters(model)}
        print(RESULT + json.dumps({"phases": everyone, **sizes}), flush=True)
    strategy.group.barrier("end")
    strategy.close()


def _loss() -> Any:
    import keras

    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _parameters(model: Any) -> int:
    return sum(int(np.prod(variable.shape)) for variable in model.trainable_variables)


def main() -> None:
    """Starts the processes; prints a table, or the last lines of a job that fails, and ends with its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--launcher", choices=("tensorflow", "horovod"), default="tensorflow")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--limit_mib", type=int, default=0, help="0 for none")
    parser.add_argument(
        "--budget", help="such as 3072M: limit of the resident memory of each process, by benchmarks/budget.sh"
    )
    parser.add_argument("--micro_batches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=20, help="after which the job has failed")
    parser.add_argument("--directory", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.directory:
        rank_program(given)
        return
    with tempfile.TemporaryDirectory() as directory:
        launch = ["-m", "tfdist.launch", f"--processes={given.processes}", f"--launcher={given.launcher}"]
        command = [sys.executable, *launch, f"--log_dir={directory}/logs", "--"]
        if given.budget:
            budget = pathlib.Path(__file__).with_name("budget.sh")
            # The launcher of several processes stays outside. That of one is inside, and sees why the kernel killed it.
            command = [budget, given.budget, *command] if given.processes == 1 else [*command, budget, given.budget]
        command += [sys.executable, __file__, *sys.argv[1:], f"--directory={directory}"]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60 * given.minutes
        )
    found = re.search(rf"{RESULT}({{.*}})", done.stdout)
    if not found:
        print(*(done.stdout + done.stderr).splitlines()[-12:], sep="\n", file=sys.stderr)
        sys.exit(done.returncode or 1)
    print(table(json.loads(found[1])))
    sys.exit(done.returncode)


def table(row: dict[str, Any]) -> str:
    """Returns what was measured as a Markdown table."""
    lines = [f"{row['parameters'] / 1e6:.0f} million parameters, a model.keras of {row['file']:.0f} MiB", ""]
    ranks = range(len(row["phases"]))
    lines += [f"| phase | {' | '.join(f'rank {r}' for r in ranks)} | most that the limit counts |"]
    lines += ["| --- " * (len(ranks) + 2) + "|"]
    for phase, measured in zip(PHASES, zip(*row["phases"], strict=True), strict=True):
        peaks = " | ".join(f"{peak:.0f}" for peak, _ in measured)
        lines.append(f"| {phase} | {peaks} | {max(counted for _, counted in measured):.0f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
