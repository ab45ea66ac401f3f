"""How much of a training step is spent waiting for data.

    python benchmarks/feeding.py --strategy=mirrored --devices=2
    python benchmarks/feeding.py --strategy=mirrored --devices=2 --augment="flip|crop(padding=4)"

Takes the flags of `tfdist train`, and by default trains a workload of `workload.py` on two replicas' rows. Prints the
median, over the windows of ten steps that count, of a step's time, of the time that it waited, and of their ratio.
"""

import argparse
import statistics
import sys
from collections.abc import Mapping

from workload import LEARNING_RATE, WORKLOADS

from tfdist.cli import command, flags, run
from tfdist.config.train_config import TrainConfig
from tfdist.coordination import Json
from tfdist.reporting import Reporter
from tfdist.trainer.options import Checks, Reporting, Schedule

WINDOW = 10  # steps
WARM_UP = 2  # windows that do not count: the first compiles


class Windows(Reporter):
    """Keeps the times of each window."""

    def __init__(self) -> None:
        """Has no window yet."""
        self.found: list[tuple[float, float]] = []

    def record(self, record: Mapping[str, Json]) -> None:
        """See base class."""
        if record["kind"] == "train" and "data_wait_seconds" in record:
            self.found.append((record["step_seconds"], record["data_wait_seconds"]))


def defaults(name: str, replicas: int, windows: int) -> list[str]:
    """Returns the flags of a workload; given ones win, because they come later."""
    workload = WORKLOADS[name]
    batch = workload.rows * replicas
    steps = WINDOW * (windows + WARM_UP)
    return [
        f"--model={workload.model}",
        f'--dataset=workload:arrays(name="{name}", count={batch * steps})',
        f"--batch_size={batch}",
        f"--steps={steps}",
        f"--steps_per_call={WINDOW}",
        f"--log_every={WINDOW}",
        f"--optimizer=sgd(learning_rate={LEARNING_RATE})",
        "--metrics=",
        "--measure_every=0",
    ]


def measure(config: TrainConfig) -> None:
    """Trains, and prints the times on the chief."""
    windows = Windows()
    with run.open_session(config) as session:
        trainer = run.make_trainer(session, session.strategy)
        trainer.fit(
            session.data.train,
            batch_size=config.batch_size,
            steps=config.steps,
            schedule=Schedule.from_config(config),
            checks=Checks.from_config(config),
            reporting=Reporting(reporter=windows),
        )
        chief = session.strategy.is_chief
    if chief:
        counted = windows.found[WARM_UP:]
        step, waited = (1e3 * statistics.median(values) for values in zip(*counted, strict=True))
        share = statistics.median(waited / step for step, waited in counted)
        print(f"A step takes {step:.1f} ms and waits {waited:.2f} ms for data: {share:.2%} of its time.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="cnn", choices=WORKLOADS)
    parser.add_argument("--replicas", type=int, default=2, help="of the whole job, for the global batch")
    parser.add_argument("--windows", type=int, default=10, help="windows of ten steps that count")
    given, rest = parser.parse_known_args()
    argv = ["feeding", *defaults(given.workload, given.replicas, given.windows), *rest]
    sys.exit(command.run("train", flags.define, lambda values: measure(flags.config(values)), argv))
