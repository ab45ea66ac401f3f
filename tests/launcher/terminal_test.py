"""A launcher whose output is lost: a terminal that is closed, as at the end of an ssh session, and full disks."""

import os
import re
import subprocess
import sys

import pytest

from tests.terminals import Terminal
from tests.waiting import DEADLINE

pytestmark = [pytest.mark.processes, pytest.mark.waits]

# Reports the request to end, takes some time to save, and is ended immediately by a second request.
SAVING = """
import os, pathlib, signal, sys, time
def save(*_):
    signal.signal(signal.SIGTERM, lambda *_: os._exit(143))
    os.write(1, b"saves\\n")  # the signal may have come within a print
    time.sleep({seconds})
    pathlib.Path("saved-" + str(os.getpid())).touch()
    sys.exit({code})
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
while True:
    time.sleep({pause})
    print("goes on", flush=True)
"""


# Rank 0 overwrites a state as a bar does, while rank 1 prints lines.
BAR = """
import fcntl, os, sys, termios, time
if os.environ["TF_CONFIG"].endswith('"index": 0}}'):
    print("columns", os.environ.get("TFDIST_TERMINAL_COLUMNS"), file=sys.stderr, flush=True)
    for percent in range(0, 101, 10):
        sys.stderr.write(f"bar {percent}%\\r")
        sys.stderr.flush()
        time.sleep(0.05)
        while any(fcntl.ioctl(2, termios.FIONREAD, bytes(4))):  # of what is read at once, the last state is shown
            time.sleep(0.001)
    sys.stderr.write("\\n")
else:
    assert "TFDIST_TERMINAL_COLUMNS" not in os.environ
    for number in range(5):
        print("line", number, flush=True)
        time.sleep(0.1)
"""


def rendered(output: bytes) -> list[str]:
    """Returns the lines that a terminal shows after some output."""
    lines, column = [""], 0
    for part in re.findall(r"\r|\n|\x1b\[2K|[^\r\n\x1b]+", output.decode()):
        if part == "\r":
            column = 0
        elif part == "\n":
            lines.append("")
        elif part == "\x1b[2K":
            lines[-1] = ""
        else:
            lines[-1] = lines[-1][:column] + part + lines[-1][column + len(part) :]
            column += len(part)
    return lines


LAUNCH = [sys.executable, "-m", "tfdist.launch", "--log_dir=logs", "--"]


def test_the_bar_of_rank_0_is_below_the_lines_of_all_ranks(tmp_path) -> None:
    with Terminal([*LAUNCH, sys.executable, "-c", BAR], tmp_path, "xterm") as one:
        assert one.end() == 0
    shown = [line for line in rendered(one.said) if not line.startswith("tfdist launch: ")]
    assert sorted(shown) == sorted(
        ["", "[0] bar 100%", "[0] columns 75", *(f"[1] line {number}" for number in range(5))]
    )
    assert one.said.count(b"bar ") > 5, "every state is shown"
    assert sorted((tmp_path / "logs" / "rank-0.log").read_text().splitlines()) == ["bar 100%", "columns 75"]


def test_a_terminal_without_a_cursor_gets_lines(tmp_path) -> None:
    with Terminal([*LAUNCH, sys.executable, "-c", BAR], tmp_path, "dumb") as one:
        assert one.end() == 0
    assert b"\x1b" not in one.said and b"[0] columns None" in one.said


@pytest.mark.parametrize(
    "seconds, code, pause, is_controlled",
    [
        (2, 75, 1000, True),
        (2, 9, 1000, True),
        (3.5, 75, 0.1, False),  # closed without a signal, as to a background job; more time than after a failure
    ],
)
def test_a_terminal_that_is_closed_lets_the_ranks_save(seconds, code, pause, is_controlled, tmp_path) -> None:
    program = SAVING.format(seconds=seconds, code=code, pause=pause)
    with Terminal([*LAUNCH, sys.executable, "-c", program], tmp_path, "xterm", is_controlled=is_controlled) as one:
        one.wait_for(b"ready", 2)
        one.screen.close()
        assert one.process.wait(DEADLINE) == code
    assert len(list(tmp_path.glob("saved-*"))) == 2


def test_output_that_finds_no_room_is_lost_and_the_job_goes_on(tmp_path) -> None:
    command = [*LAUNCH, "sh", "-c", "echo one; echo two >&2"]
    with open("/dev/full", "w") as full:
        assert subprocess.run(command, cwd=tmp_path, stdout=full, stderr=full, timeout=DEADLINE).returncode == 0
    assert sorted((tmp_path / "logs" / "rank-1.log").read_text().split()) == ["one", "two"]


def test_an_error_that_nobody_can_read_keeps_its_code() -> None:
    master, slave = os.openpty()
    os.close(master)
    try:
        words = [sys.executable, "-m", "tfdist.launch"]
        assert subprocess.run(words, stdout=slave, stderr=slave, timeout=DEADLINE).returncode == 2
    finally:
        os.close(slave)
