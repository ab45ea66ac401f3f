"""A side as it is written on the command line of `compare.py`, and its processes."""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile

import stopwatch

HERE = pathlib.Path(__file__).parent
PEERS = HERE.parent / ".venv-peers" / "bin" / "python"
RANKS = 2
BY_HAND = ("bare", "floor", "horovod", "multiworker")
MPIRUN = pathlib.Path(sys.executable).with_name("mpirun")  # of the MPI package that `make test` installs
# How the ranks of a side, or of tfdist's side with a strategy, find each other; everything else is one process.
_LAUNCHERS = {"floor": "horovod", "horovod": "horovod", "multiworker": "tensorflow"}
_TORCH = ("ddp", "post_local_sgd")  # found by a TF_CONFIG


class SideFailed(Exception):
    """A side did not end with a result; the message is the end of what it printed."""


@dataclasses.dataclass(frozen=True)
class Run:
    """What one run of a side measured.

    Attributes:
      ms: milliseconds a step, of each call.
      loss: the last one, to show that the side trains.
      link_bytes: bytes per step over the loopback interface.
    """

    ms: list[float]
    loss: float
    link_bytes: float


@dataclasses.dataclass(frozen=True)
class Side:
    """One side.

    Attributes:
      text: as written, a name and its flags: `tfdist --strategy=horovod`, `horovod --compression=fp16`.
      command: the program and its arguments.
      launcher: `--launcher` of `tfdist launch`, or "mpirun"; empty for one process.
      ranks: how many processes a launcher starts.
    """

    text: str
    command: tuple[str, ...]
    launcher: str
    ranks: int = RANKS

    @classmethod
    def parse(cls, text: str) -> "Side":
        """Reads a side; raises `SystemExit` with one line if it is not known or cannot run here."""
        name, *flags = shlex.split(text)
        ranks = next((int(flag.removeprefix("--ranks=")) for flag in flags if flag.startswith("--ranks=")), RANKS)
        flags = [flag for flag in flags if not flag.startswith("--ranks=")]
        if name in ("tfdist", "fit"):
            said = dict(re.findall(r"--(strategy|devices)=(\w+)", text))
            launcher = _LAUNCHERS.get(said.get("strategy", ""), "")
            replicas = ranks if launcher else int(said.get("devices", 1))
            program = HERE / ("trained.py" if name == "tfdist" else "fitted.py")
            return cls(text, (sys.executable, str(program), f"--replicas={replicas}", *flags), launcher, ranks)
        if name in _TORCH and PEERS.exists():
            return cls(text, (str(PEERS), str(HERE / f"{name}.py"), *flags), "tensorflow", ranks)
        if name in _TORCH:
            raise SystemExit(f"The side {name} needs PyTorch in .venv-peers. Run `make peers`.")
        if name == "dtensor":
            return cls(text, (sys.executable, str(HERE / "dtensor.py"), *flags), "")
        if name in BY_HAND:
            launcher = "mpirun" if name == "horovod" and "--communication=mpi" in flags else _LAUNCHERS.get(name, "")
            command = (sys.executable, str(HERE / "by_hand.py"), name, f"--ranks={ranks}", *flags)
            return cls(text, command, launcher, ranks)
        raise SystemExit(
            f"{name} is not a side. Known: tfdist, fit, dtensor, {', '.join(_TORCH)}, {', '.join(BY_HAND)}."
        )

    def run(self, workload: str, watch: stopwatch.Stopwatch, deadline: float) -> Run:
        """Starts the side's processes, waits for them and reads the result; raises `SideFailed`."""
        told = {"workload": workload, **dataclasses.asdict(watch)}
        command = [*self.command, *(f"--{name}={value}" for name, value in told.items())]
        with tempfile.TemporaryDirectory() as logs:
            output = _output([*self._launch(logs), *command], deadline)
        found = re.search(rf"{stopwatch.RESULT}({{.*}})", output)
        if not found:
            raise SideFailed(output.strip()[-2000:])
        return Run(**json.loads(found[1]))

    def _launch(self, logs: str) -> list[str]:
        """The command before the side's own: a launcher sets nothing but who the ranks are."""
        if not self.launcher:
            return []
        if self.launcher == "mpirun":
            return [str(MPIRUN), "-np", str(self.ranks)]
        launch = [sys.executable, "-m", "tfdist.launch", f"--processes={self.ranks}", f"--log_dir={logs}"]
        return [*launch, f"--launcher={self.launcher}", "--"]


def _output(command: list[str], deadline: float) -> str:
    """What a command prints; it is ended at the deadline, and when this process is."""
    process = subprocess.Popen(
        command,
        env={"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        return process.communicate(timeout=deadline)[0]
    except subprocess.TimeoutExpired as error:
        raise SideFailed(f"no result after {deadline:g} s") from error
    finally:
        process.terminate()  # the launcher ends its ranks
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        process.kill()
        process.wait()
