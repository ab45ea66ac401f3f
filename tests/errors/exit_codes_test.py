import signal

import pytest

from tfdist.cli import run
from tfdist.errors import ExitCode, NotFiniteError, PeerLostError, Preempted, WriteError, describe_code, describe_error
from tfdist.reporting import Reporter


@pytest.mark.parametrize(
    "code, words",
    [
        (0, "code 0 (done)"),
        (ExitCode.NOT_FINITE, "code 3 (loss not finite)"),
        (128 + signal.SIGKILL, "code 137 (killed by SIGKILL)"),
        (42, "code 42"),
        (128, "code 128"),
        (255, "code 255"),
    ],
)
def test_codes_in_words(code, words):
    assert describe_code(code) == words


@pytest.mark.parametrize(
    "error, words",
    [
        (NotFiniteError("The loss is nan at step 3."), "loss not finite"),
        (PeerLostError("rank 1"), "a peer was lost"),
        (Preempted("preempted at step 3"), "preempted"),
        (KeyboardInterrupt(), "interrupted"),
        (ZeroDivisionError("by zero"), "failed"),
    ],
)
def test_errors_in_words(error, words):
    assert describe_error(error) == words


class OnAFullDisk(Reporter):
    def close(self, outcome):
        raise WriteError("curves.png: No space left on device")


@pytest.mark.parametrize("error, warnings", [(NotFiniteError("step 3"), 1), (WriteError("metrics.jsonl"), 0)])
def test_what_cannot_be_written_at_the_end_hides_no_error(error, warnings, caplog):
    with pytest.raises(type(error)) as raised, run._close_reporter(OnAFullDisk()):
        raise error
    assert raised.value is error
    assert len(caplog.records) == warnings


def test_what_cannot_be_written_at_the_end_is_a_warning(caplog):
    with run._close_reporter(OnAFullDisk()):
        pass
    assert "No space left" in caplog.text
