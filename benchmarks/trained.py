"""This library's side: the trainer as `python -m tfdist.train` makes it, with any of its flags.

    python benchmarks/trained.py --strategy=horovod --compression=none ...

Its data pipeline and its check of every loss and gradient count; what is written to a run directory does not, but for the
checkpoints of `--checkpoint_every`, which go to a temporary directory here.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping

import stopwatch
from workload import LEARNING_RATE, WORKLOADS

from tfdist.checkpoint import manager
from tfdist.cli import command, flags, session
from tfdist.config.train_config import TrainConfig
from tfdist.reporting import NullReporter, RunPlan
from tfdist.trainer.options import Checks, Reporting, Schedule

EPOCH = 100  # steps: longer than a run, so that no epoch's end cuts a call short


class Stamps(NullReporter):
    """Notes when each call of the compiled loop had its losses on the host."""

    def __init__(self) -> None:
        """Notes nothing yet."""
        self.at: list[tuple[int, float]] = []
        self.loss = float("nan")

    def start(self, plan: RunPlan) -> None:
        """See base class."""
        self.at.append((plan.first_step, time.perf_counter()))

    def progress(self, step: int, record: Mapping[str, float]) -> None:
        """See base class."""
        self.at.append((step, time.perf_counter()))
        self.loss = record["loss"]

    def seconds_a_step(self, watch: stopwatch.Stopwatch) -> list[float]:
        """Of each whole call behind the warmup."""
        calls = [(b[0] - a[0], b[1] - a[1]) for a, b in zip(self.at, self.at[1:], strict=False)]
        counted = calls[watch.warm_calls : watch.warm_calls + watch.calls]
        return [seconds / steps for steps, seconds in counted if steps == watch.wait]


def defaults(arguments: argparse.Namespace, watch: stopwatch.Stopwatch) -> list[str]:
    """The flags of a workload; those that were given win, because they come later."""
    workload = WORKLOADS[arguments.workload]
    batch = workload.rows * arguments.replicas
    # The last step is measured for the log (the gradient's norm): it stands alone in a call that does not count.
    steps = (watch.warm_calls + watch.calls) * watch.wait + 1
    return [
        f"--model={workload.model}",
        f'--dataset=workload:arrays(name="{arguments.workload}", count={batch * EPOCH})',
        f"--batch_size={batch}",
        f"--steps={steps}",
        f"--steps_per_call={watch.wait}",
        f"--optimizer=sgd(learning_rate={LEARNING_RATE})",
        "--metrics=",
        "--log_every=1000000",
        "--measure_every=0",
    ]


def train(config: TrainConfig, watch: stopwatch.Stopwatch) -> None:
    """Trains as the command does, and prints the times on the chief."""
    stamps = Stamps()
    with session.opened(config) as opened, tempfile.TemporaryDirectory(dir=".") as directory:
        trainer = session.make_trainer(opened, opened.strategy)
        saved = manager.Checkpoints(
            directory=opened.strategy.group.broadcast("checkpoints", directory),
            every=config.checkpoint_every,
            in_background=config.checkpoint_async,
        )
        trainer.fit(
            opened.data.train,
            batch_size=config.batch_size,
            steps=config.steps,
            schedule=Schedule.of(config),
            checks=Checks.of(config),
            reporting=Reporting(reporter=stamps),
            checkpoints=saved if config.checkpoint_every != "0" else None,
        )
        chief = opened.strategy.is_chief
    if chief:
        stopwatch.report(stamps.seconds_a_step(watch), stamps.loss)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=1, help="of the whole job, for the global batch")
    stopwatch.add_arguments(parser)
    given, rest = parser.parse_known_args()
    asked = stopwatch.from_arguments(given)
    argv = ["trained", *defaults(given, asked), *rest]
    sys.exit(command.run("train", flags.define, lambda values: train(flags.config(values), asked), argv))
