"""How long an elastic job does not train when one of three processes is killed, and where the time goes.

    python benchmarks/elastic.py --launchers=horovod,tensorflow --rounds=5

Each round starts `tfdist launch --processes=2:3`, kills a rank after its first checkpoint, and follows what the launcher
prints and the run's directory shows, every few milliseconds:

- detect: from SIGKILL until the launcher has ended the two others, and starts two processes;
- start: until they have imported TensorFlow, have found each other, have built the model and have the state of the last commit;
- first call: until the first call of the compiled loop has ended, most of which is compilation.
"""

import argparse
import contextlib
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

import machine
import psutil
import starting

PHASES = ("detect", "start", "first call")
STRATEGIES = {"horovod": "horovod", "tensorflow": "multiworker"}
DEADLINE_SECONDS = 300.0


class Job:
    """An elastic run of three processes that has begun."""

    def __init__(self, home: pathlib.Path, launcher: str, model: str):
        self._home, self._printed = home, home / "printed"
        launch = ("--processes=2:3", "--rejoin_seconds=inf", f"--launcher={launcher}", f"--log_dir={home / 'logs'}")
        train = (f"--strategy={STRATEGIES[launcher]}", f"--model={model}", "--dataset=digits", "--batch_size=48")
        saving = ("--checkpoint_every=1000", "--commit_every=20", f"--output_dir={home / 'run'}")
        length = (
            "--steps=1000000",
            "--steps_per_call=5",
            "--measure_every=0",
            "--eval_every=1000000",
            "--log_every=20",
        )
        python = (sys.executable, "-m")
        command = [*python, "tfdist.launch", *launch, "--", *python, "tfdist.train", *train, *saving, *length]
        environment = os.environ | {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1"}
        with open(self._printed, "wb") as printed:
            self._process = subprocess.Popen(command, stdout=printed, stderr=printed, env=environment)

    def says(self, text: str) -> bool:
        """Whether the launcher or a rank has printed something."""
        return text in self._printed.read_text(errors="replace")

    def has_begun(self, attempt: int) -> bool:
        """Whether a start's directory was made ready, behind building and restoring."""
        starts = self._home / "run" / "starts.jsonl"
        return starts.exists() and len(starts.read_text().splitlines()) > attempt

    def has_trained(self, attempt: int) -> bool:
        """Whether the first call of a start has ended on a rank, which has then noted its examples."""
        files = (self._home / "run" / "ledger").glob(f"start-{attempt}-rank-*.bin")
        return any(file.stat().st_size for file in files)

    def until(self, condition: Callable[[], bool]) -> float:
        """Waits; returns when it was."""
        end = time.monotonic() + DEADLINE_SECONDS
        while not condition():
            if self._process.poll() is not None or time.monotonic() > end:
                sys.exit(f"The job did not go on:\n{self._printed.read_text(errors='replace')}")
            time.sleep(0.003)
        return time.monotonic()

    def kill_a_rank(self) -> float:
        """Kills the youngest rank; returns when."""
        children = psutil.Process(self._process.pid).children(recursive=True)
        ranks = [child for child in children if "tfdist.train" in child.cmdline()]
        max(ranks, key=lambda rank: rank.create_time()).send_signal(signal.SIGKILL)
        return time.monotonic()

    def end(self) -> None:
        """Ends the launcher, which ends all."""
        self._process.send_signal(signal.SIGTERM)
        self._process.wait()


@contextlib.contextmanager
def running(launcher: str, model: str) -> Iterator[Job]:
    """A run in a directory of its own."""
    with tempfile.TemporaryDirectory() as home:
        job = Job(pathlib.Path(home), launcher, model)
        try:
            yield job
        finally:
            job.end()


def round_of(launcher: str, model: str) -> list[float]:
    """The seconds of each phase."""
    with running(launcher, model) as job:
        job.until(lambda: job.has_trained(0) and job.says("loss"))
        moments = [
            job.kill_a_rank(),
            job.until(lambda: job.says("Attempt 1: 2 processes")),
            job.until(lambda: job.has_begun(1)),
            job.until(lambda: job.has_trained(1)),
        ]
    return [later - sooner for sooner, later in zip(moments, moments[1:], strict=False)]


def main() -> None:
    """Prints a table of medians, in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--launchers", default=",".join(STRATEGIES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="mlp")
    said = parser.parse_args()
    print(machine.description(starting.PEERS))
    print(f"| launcher | {' | '.join(PHASES)} | all | longest |")
    print("|---" * (len(PHASES) + 3) + "|")
    for launcher in said.launchers.split(","):
        rounds = [round_of(launcher, said.model) for _ in range(said.rounds)]
        medians = [statistics.median(column) for column in zip(*rounds, strict=True)]
        sums = [sum(one) for one in rounds]
        numbers = [*medians, statistics.median(sums), max(sums)]
        print(f"| {launcher} | {' | '.join(f'{number:.1f} s' for number in numbers)} |", flush=True)


if __name__ == "__main__":
    main()
