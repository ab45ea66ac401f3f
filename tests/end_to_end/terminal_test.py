"""What a person sees in a terminal while a run trains."""

import contextlib
import fcntl
import os
import re
import struct
import subprocess
import sys
import termios

import pytest

pytestmark = pytest.mark.processes
TRAIN = [sys.executable, "-m", "tfdist.train", "--strategy=single", "--model=mlp", "--epochs=2", "--output_dir=run"]


def states(command: list[str], columns: int, directory) -> list[str]:
    """Runs a command in a terminal of some columns; returns every state of every line, without colors."""
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    variables = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "FORCE_COLOR")}
    environment = {**variables, "TERM": "xterm-256color"}
    process = subprocess.Popen(command, cwd=directory, env=environment, stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    output = b""
    with contextlib.suppress(OSError):  # the command has ended
        while data := os.read(master, 1 << 16):
            output += data
    os.close(master)
    assert process.wait(timeout=300) == 0, output.decode()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.decode())
    return [state.rstrip() for state in re.split(r"[\r\n]+", text) if state.strip()]


@pytest.mark.parametrize(
    ("columns", "bar"),
    [
        (80, r"epoch 2/2 45/45 ━+ \d:\d\d<0:00 loss 0\.\d{4} accuracy 0\.\d{4} [\d.]+ ex/s"),
        pytest.param(60, r"epoch 2/2 45/45 ━+ \d:\d\d<0:00 loss 0\.\d{4} [\d.]+ ex/s", marks=pytest.mark.full),
    ],
)
def test_the_bar_fits_the_terminal(columns, bar, tmp_path) -> None:
    shown = states(TRAIN, columns, tmp_path)
    assert "Loading TensorFlow ..." in shown
    assert any(re.fullmatch(r"epoch 1/2  step 0/45 ━+ compiling the training step \.\.\.", state) for state in shown)
    bars = [state for state in shown if state.startswith("epoch ")]
    assert all(len(state) <= columns for state in bars), bars
    assert re.fullmatch(bar, bars[-1]), bars[-1]
    rows = [state.split()[0] for state in shown if re.match(r"[a-z]+ {2,}", state)]
    assert rows == ["model", "data", "strategy", "chosen", "batch", "length", "output"]
    assert shown[-1] == "run"
