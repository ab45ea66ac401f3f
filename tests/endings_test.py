import signal

import pytest

from tfdist.endings import MEANINGS, describe
from tfdist.errors import ExitCode


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


def test_every_code_has_a_meaning():
    assert set(MEANINGS) == set(ExitCode)
