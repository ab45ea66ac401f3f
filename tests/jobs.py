"""Jobs of real processes for tests: TF_CONFIG with free loopback ports, deadlines, and cleanup."""

import contextlib
import dataclasses
import itertools
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import BinaryIO

_PORTS = range(
    10000, 19000
)  # below the ports of outgoing connections and launchers, even with the group's offset of 1000
_port_offsets = itertools.count()


@dataclasses.dataclass(frozen=True)
class EndedProcess:
    """The end of a process.

    Attributes:
      code: its exit code; -s if it was killed by signal s.
      output: everything that it printed.
      seconds: time since the start of the job.
    """

    code: int
    output: str
    seconds: float


# (command, environment, output) -> process, which is the leader of its own session
Start = Callable[[Sequence[str], Mapping[str, str], BinaryIO], subprocess.Popen[bytes]]


class Job:
    """Several processes of one command, started together."""

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]], outputs: Sequence[str]):
        self.processes = processes
        self._outputs = outputs
        self._start_time = time.monotonic()

    def output(self, rank: int) -> str:
        """Returns the output of a rank so far."""
        with open(self._outputs[rank], encoding="utf-8", errors="replace") as file:
            return file.read()

    def wait_for(self, rank: int, text: str, seconds: float) -> None:
        """Waits until a rank has printed a text; raises `AssertionError` with every rank's output on timeout."""
        self._wait_until(lambda: text in self.output(rank), seconds, f"rank {rank} did not print {text!r}")

    def wait(self, seconds: float) -> list[EndedProcess]:
        """Waits until all processes have ended; raises `AssertionError` with every rank's output on timeout."""
        end_seconds: dict[int, float] = {}

        def all_ended() -> bool:
            for rank, process in enumerate(self.processes):
                if rank not in end_seconds and process.poll() is not None:
                    end_seconds[rank] = time.monotonic() - self._start_time
            return len(end_seconds) == len(self.processes)

        self._wait_until(all_ended, seconds, "not every rank has ended")
        return [EndedProcess(p.wait(), self.output(rank), end_seconds[rank]) for rank, p in enumerate(self.processes)]

    def kill(self) -> None:
        """Kills every process and its descendants."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _wait_until(self, condition: Callable[[], bool], seconds: float, problem: str) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                all_outputs = "\n".join(f"--- rank {r}\n{self.output(r)}" for r in range(len(self.processes)))
                raise AssertionError(f"After {seconds} s {problem}.\n{all_outputs}")
            time.sleep(0.05)


def start(
    command: Sequence[str], environment: Mapping[str, str], output: BinaryIO, directory: str | None = None
) -> subprocess.Popen[bytes]:
    """Starts a command as a new process."""
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
    """Starts a command `size` times, with a TF_CONFIG for each rank; kills all processes on exit of the context.

    Args:
      command: program and arguments; `{rank}` in them is replaced by the rank.
      size: number of processes.
      environment: additional environment variables; `{rank}` in their values is replaced by the rank.
      start: starts a process, with its standard error redirected to its output.
    """
    workers = free_addresses(size)
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as files:
        outputs = [os.path.join(directory, f"{rank}.txt") for rank in range(size)]
        processes: list[subprocess.Popen[bytes]] = []
        started_job = Job(processes, outputs)
        files.callback(started_job.kill)
        for rank in range(size):
            config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}}
            rank_environment = {name: value.replace("{rank}", str(rank)) for name, value in (environment or {}).items()}
            with open(outputs[rank], "wb") as output:
                arguments = [argument.replace("{rank}", str(rank)) for argument in command]
                processes.append(
                    start(arguments, {**os.environ, **rank_environment, "TF_CONFIG": json.dumps(config)}, output)
                )
        yield started_job


def free_addresses(count: int) -> list[str]:
    """Returns loopback addresses whose ports, and the group's ports derived from them, are free.

    Other programs are unlikely to take them before the job does: outgoing connections use other ports, and each calling
    process starts its search at another port.
    """
    with contextlib.ExitStack() as stack:
        addresses: list[str] = []
        while len(addresses) < count:
            probe, group_socket = (stack.enter_context(socket.socket()) for _ in range(2))
            offset = os.getpid() * 5563 + next(_port_offsets)  # spreads processes with successive ids
            port = _PORTS[offset % len(_PORTS)]
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                group_socket.bind(("127.0.0.1", port + 1000))
                addresses.append(f"127.0.0.1:{port}")
        return addresses
