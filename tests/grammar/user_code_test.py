"""A failure in a user's own function is reported in one line, for every kind of callable."""

import functools

import pytest

from tfdist.errors import InputError, NotFiniteError
from tfdist.grammar.spec import Spec
from tfdist.grammar.user_code import call_own


def fails():
    raise KeyError("first\nsecond")


class Fails:
    def __init__(self):
        fails()


class FailsWhenCalled:
    def __call__(self):
        fails()


@pytest.mark.parametrize("function", [fails, Fails, FailsWhenCalled(), functools.partial(fails)])
def test_the_line_says_what_and_where(function):
    with pytest.raises(InputError) as caught:
        call_own("--model", function, Spec("own:name"))
    message = str(caught.value)
    assert message.startswith(
        f"--model=own:name must not fail. Received: KeyError: 'first\\nsecond' ({__file__}, line "
    )
    assert "\n" not in message


def test_a_builtin_has_no_line_of_its_own():
    with pytest.raises(InputError, match=r"Received: TypeError: len\(\) takes exactly one argument .*spec.py, line"):
        call_own("--dataset", len, Spec("builtins:len"))


@pytest.mark.parametrize("error", [NotFiniteError("Step 3."), MemoryError("no more")])
def test_errors_with_a_meaning_pass_through(error):
    def function():
        raise error

    with pytest.raises(type(error)):
        call_own("--model", function, Spec("own:name"))
