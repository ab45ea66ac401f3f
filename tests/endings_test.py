import signal

import pytest

from tfdist.endings import MEANINGS, describe, of_error
from tfdist.errors import ExitCode, NotFiniteError, PeerLostError, Preempted


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
    assert describe(code) == words


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
    assert of_error(error) == words


def test_every_code_has_a_meaning():
    assert set(MEANINGS) == set(ExitCode)
