"""Real processes for tests: a job under a TF_CONFIG on free loopback ports, with a deadline, and nothing left behind."""

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import BinaryIO, Protocol


@dataclasses.dataclass(frozen=True)
class Ended:
    """How one process ended: its exit code (-s for death by signal s), all that it printed, seconds since the start."""

    code: int
    output: str
    seconds: float


class Process(Protocol):
    """That part of `subprocess.Popen` which a job uses. The process leads a session of its own."""

    @property
    def pid(self) -> int:
        """Its number."""

    @property
    def returncode(self) -> int | None:
        """How it ended, once `poll` or `wait` has seen that; -s for death by signal s."""

    def poll(self) -> int | None:
        """Returns `returncode`."""

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end; raises `subprocess.TimeoutExpired`."""


Start = Callable[[Sequence[str], Mapping[str, str], BinaryIO], Process]  # a command, all its variables, its output


class Job:
    """Several processes of one command that were started together."""

    def __init__(self, processes: Sequence[Process], outputs: Sequence[str]):
        """Args: processes: by rank; outputs: the files that they print to, by rank."""
        self.processes = processes
        self._outputs = outputs
        self._started = time.monotonic()

    def output(self, rank: int) -> str:
        """What a rank has printed so far."""
        with open(self._outputs[rank], encoding="utf-8", errors="replace") as file:
            return file.read()

    def wait_for(self, rank: int, text: str, seconds: float) -> None:
        """Waits until a rank has printed a text."""
        self._until(lambda: text in self.output(rank), seconds, f"rank {rank} did not print {text!r}")

    def wait(self, seconds: float) -> list[Ended]:
        """Waits until all have ended; raises `AssertionError` with every rank's output if they have not in time."""
        ends: dict[int, float] = {}

        def all_ended() -> bool:
            for rank, process in enumerate(self.processes):
                if rank not in ends and process.poll() is not None:
                    ends[rank] = time.monotonic() - self._started
            return len(ends) == len(self.processes)

        self._until(all_ended, seconds, "not every rank has ended")
        return [Ended(p.wait(), self.output(rank), ends[rank]) for rank, p in enumerate(self.processes)]

    def kill(self) -> None:
        """Ends every process and whatever it started."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _until(self, condition: Callable[[], bool], seconds: float, problem: str) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                everything = "\n".join(f"--- rank {r}\n{self.output(r)}" for r in range(len(self.processes)))
                raise AssertionError(f"After {seconds} s {problem}.\n{everything}")
            time.sleep(0.05)


def start(
    command: Sequence[str], environment: Mapping[str, str], output: BinaryIO, directory: str | None = None
) -> Process:
    """Starts a command as a new process, in a directory or in this process's."""
    return subprocess.Popen(
        command,
        cwd=directory,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


@contextlib.contextmanager
def job(
    command: Sequence[str], size: int, environment: Mapping[str, str] | None = None, *, start: Start = start
) -> Iterator[Job]:
    """Starts a command `size` times, each with a TF_CONFIG of its own rank; ends all of them when the block is left.

    Args:
      command: program and arguments; `{rank}` in them stands for the rank.
      size: how many processes.
      environment: variables beside this process's own; `{rank}` in their values stands for the rank.
      start: starts each of them, with standard error in its output.
    """
    workers = free_addresses(size)
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as files:
        outputs = [os.path.join(directory, f"{rank}.txt") for rank in range(size)]
        processes: list[Process] = []
        running = Job(processes, outputs)
        files.callback(running.kill)
        for rank in range(size):
            config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}}
            own = {name: value.replace("{rank}", str(rank)) for name, value in (environment or {}).items()}
            with open(outputs[rank], "wb") as output:
                arguments = [argument.replace("{rank}", str(rank)) for argument in command]
                processes.append(start(arguments, {**os.environ, **own, "TF_CONFIG": json.dumps(config)}, output))
        yield running


def free_addresses(count: int) -> list[str]:
    """Loopback addresses whose ports, and those of the group derived from them, were free a moment ago."""
    with contextlib.ExitStack() as stack:
        found: list[str] = []
        while len(found) < count:
            probe, neighbour = (stack.enter_context(socket.socket()) for _ in range(2))
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
            with contextlib.suppress(OSError):
                neighbour.bind(("127.0.0.1", port + 1000 if port + 1000 <= 65535 else port - 1000))
                found.append(f"127.0.0.1:{port}")
        return found
