"""What a person sees in a terminal while a run trains, and Ctrl-C there."""

import pathlib
import re
import sys

import pytest

from tests.terminals import Terminal
from tfdist.checkpoint.format import complete_checkpoints

pytestmark = pytest.mark.processes
SECONDS = 300.0
TRAIN = [sys.executable, "-m", "tfdist.train", "--dataset=digits", "--output_dir=run"]


def states(command: list[str], columns: int, directory: pathlib.Path) -> list[str]:
    """Runs a command in a terminal of some columns; returns every state of every line, without colors."""
    with Terminal(command, directory, "xterm-256color", columns) as one:
        assert one.end(SECONDS) == 0, one.said.decode()
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
    train = [*launch, *TRAIN, "--model=mlp(hidden=(8,))", *strategy, "--steps=1000000", "--log_every=10"]
    with Terminal(train, tmp_path, "dumb") as one:
        one.wait_for(b"step 20/", seconds=SECONDS)
        one.screen.write(b"\x03")
        assert one.end(SECONDS) == 130, one.said.decode()
    said = one.said.decode()
    [saved] = complete_checkpoints(tmp_path / "run" / "checkpoints")
    if launch:
        assert said.count("tfdist launch: Interrupted: all ranks have saved. Resume with the same command") == 1
    else:
        step = int(saved.name[-9:])
        assert said.count(f"tfdist train: Interrupted: saved at step {step} in run/checkpoints. Resume with") == 1
        assert "Received Ctrl-C: saving and stopping at the next agreed step; a second Ctrl-C exits at once." in said
