import operator
import threading

import pytest

from tfdist.errors import InputError, NotFiniteError
from tfdist.launcher import spawn

pytestmark = pytest.mark.processes


class Picky(Exception):
    """Can be pickled but not unpickled: its constructor takes two arguments, but `args` has one."""

    def __init__(self, step, loss):
        super().__init__(f"step {step}: {loss}")


def test_an_exception_that_does_not_travel_is_told_of(tmp_path):
    def fail():
        raise Picky(7, "inf")

    spawn.write_call(tmp_path, fail, (), {})
    spawn.make_call(tmp_path, 0)
    result = spawn.read_result(tmp_path, 0)
    assert result and repr(result.error) == "RuntimeError('Picky: step 7: inf')"


def test_a_value_that_does_not_travel_is_an_error(tmp_path):
    spawn.write_call(tmp_path, threading.Lock, (), {})
    error = spawn.make_call(tmp_path, 0).error
    assert isinstance(error, TypeError) and "pickle" in str(error)


@pytest.mark.parametrize("error", [NotFiniteError("x"), ValueError("y")])
def test_what_does_not_travel_at_all_is_bad_input(tmp_path, error):
    with pytest.raises(InputError, match="spawn must be able to pickle"):
        spawn.write_call(tmp_path, operator.add, (threading.Lock(), error), {})
