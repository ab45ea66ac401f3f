"""This library's side: the trainer as `tfdist train` makes it, with any of its flags.

    python benchmarks/trained.py --strategy=horovod --compression=none ...

Its data pipeline and its check of every loss and gradient count; what is written to a run directory does not, but for the
checkpoints of `--checkpoint_every`, which go to a temporary directory here.
"""

import argparse
import itertools
import math
import sys
import tempfile
import time
from collections.abc import Mapping

import stopwatch
from workload import LEARNING_RATE, WORKLOADS

from tfdist.checkpoint import manager
from tfdist.cli import command, flags, run
from tfdist.config.train_config import TrainConfig
from tfdist.reporting import Reporter, RunPlan
from tfdist.trainer.options import Checks, Reporting, Schedule

EPOCH = 100  # steps, or a whole run, if that is longer: no epoch's end cuts a call short


class Stamps(Reporter):
    """Notes when each call of the compiled loop had its losses on the host."""

    def __init__(self) -> None:
        """Notes nothing yet."""
        self.at: list[tuple[int, float, int]] = []
        self.loss = float("nan")

    def start(self, plan: RunPlan) -> None:
        """See base class."""
        self.at.append((plan.first_step, time.perf_counter(), stopwatch.link_bytes()))

    def progress(self, step: int, record: Mapping[str, float]) -> None:
        """See base class."""
        self.at.append((step, time.perf_counter(), stopwatch.link_bytes()))
        self.loss = record["loss"]

    def measured(self, watch: stopwatch.Stopwatch) -> stopwatch.Measured:
        """Of the periods of `watch.wait` steps after the warmup; exchanges of weights may divide them into several calls."""
        first = self.at[0][0]
        borders = [stamp for stamp in self.at if (stamp[0] - first) % watch.wait == 0]
        periods = [[end - start for start, end in zip(*pair, strict=True)] for pair in itertools.pairwise(borders)]
        counted = [p for p in periods[watch.warm_calls : watch.warm_calls + watch.calls] if p[0] == watch.wait]
        steps = sum(period[0] for period in counted)
        sent = sum(period[2] for period in counted) / steps if steps else math.nan
        return stopwatch.Measured([seconds / wait for wait, seconds, _ in counted], self.loss, sent)


def defaults(arguments: argparse.Namespace, watch: stopwatch.Stopwatch) -> list[str]:
    """The flags of a workload; those that were given win, because they come later."""
    workload = WORKLOADS[arguments.workload]
    batch = workload.rows * arguments.replicas
    # The last step is measured for the log (the gradient's norm): it stands alone in a call that does not count.
    steps = (watch.warm_calls + watch.calls) * watch.wait + 1
    return [
        f"--model={workload.model}",
        f'--dataset=workload:arrays(name="{arguments.workload}", count={batch * max(EPOCH, steps)})',
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
    with run.open_session(config) as session, tempfile.TemporaryDirectory(dir=".") as directory:
        trainer = run.make_trainer(session, session.strategy)
        saved = manager.Checkpoints(
            directory=session.strategy.group.broadcast("checkpoints", directory),
            every=config.checkpoint_every,
            in_background=config.checkpoint_async,
        )
        trainer.fit(
            session.data.train,
            batch_size=config.batch_size,
            steps=config.steps,
            schedule=Schedule.from_config(config),
            checks=Checks.from_config(config),
            reporting=Reporting(reporter=stamps),
            checkpoints=saved if config.checkpoint_every != "0" else None,
        )
        chief = session.strategy.is_chief
    if chief:
        stopwatch.report(*stamps.measured(watch))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=1, help="of the whole job, for the global batch")
    stopwatch.add_arguments(parser)
    given, rest = parser.parse_known_args()
    asked = stopwatch.from_arguments(given)
    argv = ["trained", *defaults(given, asked), *rest]
    sys.exit(command.run("train", flags.define, lambda values: train(flags.config(values), asked), argv))
