"""Runs programs like users, each in its own directory, and compares their results."""

import functools
import json
import os
import pathlib
import pickle
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tests import processes
from tests.programs.catalog import HERE, Program

OBSERVED = str(HERE / "observed.py")
RUN = (sys.executable, "-m", "tfdist.run", "--start_timeout_seconds=60")
LAUNCH = (sys.executable, "-m", "tfdist.launch", "--processes=2")
STRATEGIES = {
    "plain": (sys.executable,),
    "mirrored": (*RUN, "--strategy=mirrored", "--devices=2"),
    "multiworker": (*LAUNCH, "--", *RUN),
    "horovod": (*LAUNCH, "--launcher=horovod", "--", *RUN),
    # For scripts that create a strategy of tf.distribute themselves.
    "own mirrored": (sys.executable,),
    "own multiworker": (*LAUNCH, "--", sys.executable),
}
SECONDS = 180.0  # after which a program is ended
_FLOOR = 1e-2  # norms below this are compared absolutely, because some weights are only rounding errors
_EXPECTED = re.compile(r"Received|Error|error|Traceback|Refused|refused")


class Outcome(NamedTuple):
    """The result of a program."""

    code: int | None  # None if it had to be killed
    ranks: list[dict[str, Any]]  # recorded results of each process
    output: str  # everything that was printed


def start(
    script: str,
    strategy: str,
    *,
    precision: str = "float64",
    quiet: tuple[str, ...] = ("--quiet",),
    seed: int = 0,
) -> Outcome:
    """Runs a program until it ends.

    With options of `observed` that remove randomness, and `seed` added to the seeds that the script sets.
    """
    with tempfile.TemporaryDirectory() as directory:
        root = pathlib.Path(directory)
        for name in ("found", "work"):
            (root / name).mkdir()
        options = [*quiet, f"--seed={seed}", *(["--plain"] if strategy == "plain" else [])]
        flags = [f"--seed={seed}", *(["--batch_norm=synchronized"] if quiet else [])]
        flags = flags if "tfdist.run" in STRATEGIES[strategy] else []
        command = [*STRATEGIES[strategy], *flags, OBSERVED, str(root / "found"), *options, str(HERE / script)]
        code, output = _ended(command, root, precision)
        ranks = [pickle.loads(path.read_bytes()) for path in sorted((root / "found").iterdir())]
        return Outcome(code, ranks, output)


@functools.cache
def _keras_home(precision: str) -> tempfile.TemporaryDirectory[str]:
    """Returns a directory with a Keras configuration, for all programs with this precision."""
    directory = tempfile.TemporaryDirectory(prefix="tfdist-keras-")
    config = {"floatx": precision, "epsilon": 1e-07, "backend": "tensorflow", "image_data_format": "channels_last"}
    pathlib.Path(directory.name, "keras.json").write_text(json.dumps(config))
    return directory


def _ended(command: list[str], root: pathlib.Path, precision: str) -> tuple[int | None, str]:
    threads = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1", "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **threads, "KERAS_HOME": _keras_home(precision).name, "TF_CPP_MIN_LOG_LEVEL": "3"}
    with (root / "output").open("wb") as output:
        process = processes.start(command, environment, output, str(root / "work"))
        try:
            code: int | None = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            code = None
    return code, (root / "output").read_text(errors="replace")


def verdicts(program: Program, strategies: Sequence[str]) -> dict[str, str]:
    """Returns one line by strategy: "equal", "distribution", "refused: ..." or what is wrong."""
    plain = start(program.path, "plain", quiet=program.quiet)
    if plain.code:
        return dict.fromkeys(strategies, f"fails without tfdist: {last_line(plain.output)}")
    chosen = [strategy for strategy in strategies if program.own_strategy in ("", strategy)]
    own = "own " if program.own_strategy else ""
    return {name: verdict(program, start(program.path, own + name, quiet=program.quiet), plain) for name in chosen}


def is_good(verdict: str) -> bool:
    return verdict in ("equal", "distribution") or verdict.startswith(("refused:", "distribution:"))


def verdict(program: Program, ours: Outcome, plain: Outcome) -> str:
    """Compares the result of a program with that of one device."""
    last = last_line(ours.output)
    if ours.code is None:
        return "hangs"
    if ours.code == 2 and program.refused and program.refused in last:
        return f"refused: {last}"
    if ours.code or not ours.ranks:
        return f"fails with code {ours.code}: {last}"
    if program.refused:
        return "differs: it is not refused"
    first = ours.ranks[0]["weights"]
    if any(not _same(found["weights"], first[: len(found["weights"])]) for found in ours.ranks[1:]):
        return "differs: processes are not equal bit for bit"
    if program.distribution:
        return "distribution"
    compared = ours.ranks[:1] if program.own_strategy else ours.ranks  # the chief, which may load what it saved
    for rank, found in enumerate(compared):
        if wrong := differences(found, plain.ranks[0], program.tolerance):
            return f"differs at {rank}: {wrong[0]} and {len(wrong) - 1} more"
    return "equal"


def differences(ours: Any, plain: Any, tolerance: float, path: str = "") -> list[str]:
    """Describes where two structures of numbers differ by more than rounding, and by how much."""
    if isinstance(plain, dict):
        if set(ours) != set(plain):
            return [f"{path}: {sorted(ours)} in place of {sorted(plain)}"]
        return [line for key in plain for line in differences(ours[key], plain[key], tolerance, f"{path}/{key}")]
    if isinstance(plain, list | tuple):
        if len(ours) != len(plain):
            return [f"{path}: {len(ours)} values in place of {len(plain)}"]
        pairs = enumerate(zip(ours, plain, strict=True))
        return [line for i, (a, b) in pairs for line in differences(a, b, tolerance, f"{path}/{i}")]
    a, b = np.asarray(ours), np.asarray(plain)
    if a.shape != b.shape:
        return [f"{path}: shape {a.shape} in place of {b.shape}"]
    if a.dtype.kind not in "fiub":
        return [] if (a == b).all() else [f"{path}: not the same"]
    a, b = a.astype("float64"), b.astype("float64")
    if not np.array_equal(np.isnan(a), np.isnan(b)):
        return [f"{path}: not a number"]
    difference = float(np.linalg.norm(np.nan_to_num(a - b)) / max(float(np.linalg.norm(np.nan_to_num(b))), _FLOOR))
    return [] if difference <= tolerance else [f"{path} by {difference:.1e}"]


def _same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, list):
        return len(ours) == len(theirs) and all(_same(a, b) for a, b in zip(ours, theirs, strict=True))
    return bool(np.array_equal(ours, theirs, equal_nan=True))


def last_line(output: str) -> str:
    """Returns the last line that contains a reason."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    found = [line for line in lines if _EXPECTED.search(line)]
    return (found or lines or ["nothing was printed"])[-1]
