"""What a person sees in a terminal while a run trains, and Ctrl-C there."""

import fcntl
import os
import pathlib
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time

import pytest

from tfdist.checkpoint.format import newest

pytestmark = pytest.mark.processes
SECONDS = 300.0
TRAIN = [sys.executable, "-m", "tfdist.train", "--dataset=digits", "--output_dir=run"]


class Terminal:
    def __init__(self, command: list[str], directory: pathlib.Path, name: str, columns: int = 80):
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        words = ["sh", "-c", 'exec "$@" <>"$0" >&0 2>&1', os.ttyname(slave), *command]
        inherited = {name: v for name, v in os.environ.items() if name not in ("COLUMNS", "LINES", "FORCE_COLOR")}
        environment = {**inherited, "TERM": name}
        self.process = subprocess.Popen(
            words, cwd=directory, env=environment, stdout=slave, stderr=slave, start_new_session=True
        )
        os.close(slave)
        self.said = b""

    def wait_for(self, text: bytes) -> None:
        end = time.monotonic() + SECONDS
        while text not in self.said and time.monotonic() < end:
            self._read(end - time.monotonic())
        assert text in self.said, self.said.decode()

    def end(self) -> int:
        end = time.monotonic() + SECONDS
        while self.process.poll() is None and time.monotonic() < end:
            self._read(0.2)
        while self._read(0.2):
            pass
        return self.process.wait(timeout=1)

    def _read(self, seconds: float) -> bool:
        """Reads what is there, or what comes within some seconds; returns whether there was anything."""
        try:
            if select.select([self.master], [], [], max(seconds, 0.0))[0]:
                self.said += os.read(self.master, 1 << 16)
                return True
        except OSError:  # nobody has the terminal open any more
            time.sleep(0.05)
        return False

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)


def states(command: list[str], columns: int, directory: pathlib.Path) -> list[str]:
    """Runs a command in a terminal of some columns; returns every state of every line, without colors."""
    one = Terminal(command, directory, "xterm-256color", columns)
    try:
        assert one.end() == 0, one.said.decode()
    finally:
        one.close()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", one.said.decode())
    return [state.rstrip() for state in re.split(r"[\r\n]+", text) if state.strip()]


@pytest.mark.parametrize(
    ("columns", "bar"),
    [
        (80, r"epoch 2/2 45/45 ━+ \d:\d\d<0:00 loss 0\.\d{4} accuracy 0\.\d{4} [\d.]+ ex/s"),
        pytest.param(60, r"epoch 2/2 45/45 ━+ \d:\d\d<0:00 loss 0\.\d{4} [\d.]+ ex/s", marks=pytest.mark.full),
    ],
)
def test_the_bar_fits_the_terminal(columns, bar, tmp_path) -> None:
    shown = states([*TRAIN, "--strategy=single", "--model=mlp", "--epochs=2"], columns, tmp_path)
    assert "Loading TensorFlow ..." in shown
    assert any(re.fullmatch(r"epoch 1/2  step 0/45 ━+ compiling the training step \.\.\.", state) for state in shown)
    bars = [state for state in shown if state.startswith("epoch ")]
    assert all(len(state) <= columns for state in bars), bars
    assert re.fullmatch(bar, bars[-1]), bars[-1]
    rows = [state.split()[0] for state in shown if re.match(r"[a-z]+ {2,}", state)]
    assert rows == ["model", "data", "strategy", "chosen", "batch", "length", "output"]
    assert shown[-1] == "run"


LAUNCH = [sys.executable, "-m", "tfdist.launch", "--processes=2", "--"]


@pytest.mark.parametrize("launch", [[], pytest.param(LAUNCH, marks=pytest.mark.full)], ids=["alone", "launched"])
def test_ctrl_c_in_a_terminal_saves_and_the_same_command_resumes(launch, tmp_path) -> None:
    strategy = [] if launch else ["--strategy=single"]
    one = Terminal(
        [*launch, *TRAIN, "--model=mlp(hidden=(8,))", *strategy, "--steps=1000000", "--log_every=10"], tmp_path, "dumb"
    )
    try:
        one.wait_for(b"step 20/")
        os.write(one.master, b"\x03")
        assert one.end() == 130, one.said.decode()
    finally:
        one.close()
    said = one.said.decode()
    [saved] = newest(tmp_path / "run" / "checkpoints")
    if launch:
        assert said.count("tfdist launch: Interrupted: all ranks have saved. Resume with the same command") == 1
    else:
        step = int(saved.name[-9:])
        assert said.count(f"tfdist train: Interrupted: saved at step {step} in run/checkpoints. Resume with") == 1
        assert "Received Ctrl-C: saving and stopping at the next agreed step; a second Ctrl-C exits at once." in said
