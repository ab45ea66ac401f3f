"""Two processes end alike: at their best, and early; and Ctrl-C in a terminal."""

import json
import os
import pathlib
import pty
import select
import subprocess
import sys
import time

import keras
import numpy as np
import pytest

from tests import processes
from tfdist.checkpoint.format import Checkpoint, newest

pytestmark = pytest.mark.processes

SECONDS = 300.0
TRAIN = [sys.executable, "-m", "tfdist.train", "--dataset=digits", "--model=mlp(hidden=(8,))", "--output_dir=run"]


@pytest.mark.smoke
def test_two_processes_end_early_and_export_the_average_of_the_best_step(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    ends = ["--best=val_loss", "--early_stopping=val_loss(patience=2, min_delta=100)", "--ema=0.5", "--eval_every=3"]
    diverging = ["--optimizer=sgd(momentum=0.95)", "--learning_rate=3", "--strategy=multiworker", "--steps=50"]
    said = "early stopping at step 9: val_loss has not improved for 2 evaluations since step 3"
    for is_first in (True, False):
        outputs = processes.finish([*TRAIN, *ends, *diverging], 2)
        told = f"E{said[1:]}." if is_first else f"This run has finished by {said}. Its model is run/model.keras."
        assert [told in output for output in outputs] == [True, False]
    run = pathlib.Path("run")
    losses = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        losses |= {record["step"]: record["loss"]} if record["kind"] == "eval" else {}
    assert list(losses) == [3, 6, 9]
    best = min(losses, key=losses.__getitem__)
    path = next(path for path in newest(run / "checkpoints") if path.name == f"step-{best:09d}")
    saved = Checkpoint.open(path)
    averages = [saved.read(name) for name in saved.values["order"] if "average" in name]
    for found, wanted in zip(keras.saving.load_model(run / "model.keras").get_weights(), averages, strict=True):
        np.testing.assert_array_equal(found, wanted)


class Terminal:
    """A command in the foreground of a new terminal."""

    def __init__(self, command: list[str], directory: pathlib.Path):
        self.master, slave = pty.openpty()
        words = ["sh", "-c", 'exec "$@" <>"$0" >&0 2>&1', os.ttyname(slave), *command]
        environment = {**os.environ, "TERM": "dumb"}
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


LAUNCH = [sys.executable, "-m", "tfdist.launch", "--processes=2", "--"]


@pytest.mark.parametrize("launch", [[], pytest.param(LAUNCH, marks=pytest.mark.full)], ids=["alone", "launched"])
def test_ctrl_c_in_a_terminal_saves_and_the_same_command_resumes(launch, tmp_path) -> None:
    strategy = [] if launch else ["--strategy=single"]
    one = Terminal([*launch, *TRAIN, *strategy, "--steps=1000000", "--log_every=10"], tmp_path)
    try:
        one.wait_for(b"step 20/")
        os.write(one.master, b"\x03")
        assert one.end() == 130, one.said.decode()
    finally:
        one.close()
    said = one.said.decode()
    [saved] = newest(tmp_path / "run" / "checkpoints")
    if launch:
        assert said.count("tfdist.launch: Interrupted: all ranks have saved. Resume with the same command") == 1
    else:
        step = int(saved.name[-9:])
        assert said.count(f"tfdist.train: Interrupted: saved at step {step} in run/checkpoints. Resume with") == 1
        assert "Received Ctrl-C: saving and stopping at the next agreed step; a second Ctrl-C exits at once." in said
