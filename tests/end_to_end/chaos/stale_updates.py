"""Kills and stops processes of parameter servers at random; one device must then make the same updates again.

python -m tests.end_to_end.chaos.stale_updates --seeds=100
"""

import argparse
import contextlib
import pathlib
import random
import re
import signal
import sys
import tempfile
import time
from typing import Any, NamedTuple

import psutil

from tests import processes
from tfdist.cluster import progress_file

STEPS, BOUND, WORKERS, SERVERS = 300, 2, 3, 2
MAX_WAIT_SECONDS = 30.0  # without a step; a process that is silent for 20 s is lost
DEADLINE_SECONDS = 400.0
_VERIFY = (
    "--strategy=parameter_server",
    "--model=tests.end_to_end.chaos.network:network",
    "--dataset=digits",
    f"--steps={STEPS}",
    "--float64",
    "--optimizer=sgd(momentum=0.9)",
)


class Blow(NamedTuple):
    """A signal to a process."""

    rank: int
    signal: signal.Signals  # SIGKILL or SIGSTOP
    step: int  # after which it is sent
    pause: float = 0.0  # seconds after which a stopped process continues; 0 for never


class Outcome(NamedTuple):
    """The result of one seed."""

    staleness: str
    blows: list[Blow]
    longest_wait: float  # seconds without a step while no process was restarted
    problems: list[str]  # empty if the run ended as it must


def plan(seed: int) -> tuple[str, list[Blow]]:
    """Returns the staleness and the blows of a seed. Rank 0 is not struck: `verify` has its result."""
    drawn = random.Random(f"stale updates {seed}")
    workers, servers = range(1, WORKERS), range(WORKERS, WORKERS + SERVERS)
    blows = []
    for _ in range(drawn.choice((1, 2))):
        step = drawn.randrange(10, STEPS // 2)
        kind = drawn.choice(("kill a worker", "kill a worker", "stop a worker", "pause", "kill a server"))
        if kind == "pause":
            rank, pause = drawn.randrange(1, WORKERS + SERVERS), drawn.uniform(1, 4)
            blows.append(Blow(rank, signal.SIGSTOP, step, pause))
        else:
            number = signal.SIGSTOP if "stop" in kind else signal.SIGKILL
            blows.append(Blow(drawn.choice(servers if "server" in kind else workers), number, step))
    return drawn.choice((f"bounded({BOUND})", "async")), sorted(blows, key=lambda blow: blow.step)


def outcome(seed: int, home: pathlib.Path) -> Outcome:
    staleness, blows = plan(seed)
    flags = [f"--processes={WORKERS}", f"--servers={SERVERS}", f"--log_dir={home / str(seed)}", "--max_restarts=3"]
    launch = [sys.executable, "-m", "tfdist.launch", *flags, "--rejoin_seconds=inf", "--"]
    verify = [sys.executable, "-m", "tfdist.verify", *_VERIFY, f"--staleness={staleness}"]
    with processes.job([*launch, *verify], 1, processes.ONE_THREAD) as job:
        longest = _strike(job.processes[0], list(blows))
        [end] = job.wait(DEADLINE_SECONDS)
    problems = [f"it ended with code {end.code}"] if end.code else []
    ages = [int(age) for age in re.findall(r"which were up to (\d+) updates old", end.output)]
    problems += [] if ages else ["nothing was compared"]
    lost = sum(blow.signal == signal.SIGKILL and blow.rank >= WORKERS for blow in blows)
    if (restarts := end.output.count(": restart ")) > lost:  # training goes on without a worker
        problems.append(f"it was restarted {restarts} times")
    problems += (
        [f"a gradient was {max(ages)} updates old"] if ages and staleness != "async" and max(ages) > BOUND else []
    )
    problems += [f"there was no step for {longest:.1f} s"] if longest > MAX_WAIT_SECONDS else []
    return Outcome(staleness, blows, longest, [*problems, end.output] if problems else [])


def _strike(launcher: Any, blows: list[Blow]) -> float:
    """Sends the signals at their steps; returns the longest time without a step."""
    step, since, longest, note = 0, time.monotonic(), 0.0, None
    ranks: list[psutil.Process] = []
    while launcher.poll() is None and step < STEPS:
        time.sleep(0.02)
        found, now = _ranks(launcher.pid), time.monotonic()
        if len(found) == WORKERS + SERVERS and (not ranks or found[0] != ranks[0]):  # started, or started again
            ranks, step, since = found, 0, now
        note = note or (_note(ranks[0]) if ranks else None)
        noted = (progress_file.read(note)[0] if note and note.exists() else 0) or 0
        if noted > step:
            longest, step, since = max(longest, now - since if step else 0.0), noted, now
        if blows and ranks and step >= blows[0].step:
            blow = blows.pop(0)
            _send(ranks[blow.rank], blow)
    return longest


def _send(process: psutil.Process, blow: Blow) -> None:
    with contextlib.suppress(psutil.Error):
        process.send_signal(blow.signal)
        if blow.pause:
            time.sleep(blow.pause)
            process.send_signal(signal.SIGCONT)


def _ranks(launcher: int) -> list[psutil.Process]:
    """Returns the processes of the ranks, without those that have ended; forked ones have the name of the command."""
    ranks = []
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(launcher).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if child.name() == "tfdist.verify" or "tfdist.verify" in child.cmdline():
                    ranks.append(child)
    return sorted(ranks, key=lambda process: (process.create_time(), process.pid))


def _note(chief: psutil.Process) -> pathlib.Path | None:
    """Returns the file of the first rank's progress, which it has open while it trains."""
    with contextlib.suppress(psutil.Error):
        return next((pathlib.Path(f.path) for f in chief.open_files() if f.path.endswith("/rank-0")), None)
    return None


def main() -> int:
    """Prints a line for each seed; returns whether there was any problem."""
    parser = argparse.ArgumentParser(prog="python -m tests.end_to_end.chaos.stale_updates", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="the first seed, to repeat one (default: 0)")
    said = parser.parse_args()
    home, wrong = pathlib.Path(tempfile.mkdtemp(prefix="chaos-")), 0
    for seed in range(said.first, said.first + said.seeds):
        made = outcome(seed, home)
        wrong += bool(made.problems)
        blows = ", ".join(f"{blow.signal.name} {blow.rank} at {blow.step}" for blow in made.blows)
        result = "".join(f"\n  {problem}" for problem in made.problems) or ", equal"
        print(f"seed {seed}: {made.staleness}, {blows}, longest wait {made.longest_wait:.1f} s{result}", flush=True)
    print(f"{wrong} of {said.seeds} seeds were wrong." if wrong else "No difference.")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
