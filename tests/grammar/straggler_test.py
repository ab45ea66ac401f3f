import pytest

from tfdist.errors import InputError
from tfdist.grammar.straggler import Straggler, balanced, parse_straggler


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("wait", Straggler()),
        ("balance", Straggler("balance")),
        ("drop(after=1.5)", Straggler("drop", 1.5)),
        ("drop( after = 2 )", Straggler("drop", 2.0)),
        ("drop(after=auto)", Straggler("drop")),
        ("drop(after='auto')", Straggler("drop")),
        ("drop", Straggler("drop")),
    ],
)
def test_a_value_is_parsed_and_written_alike(text, expected):
    assert parse_straggler(text) == expected
    assert parse_straggler(str(expected)) == expected
    assert str(parse_straggler(str(expected))) == str(expected)


def test_only_without_seconds_are_they_measured():
    assert parse_straggler("drop").is_measured
    assert not parse_straggler("drop(after=1)").is_measured
    assert not parse_straggler("balance").is_measured


@pytest.mark.parametrize("after", ["0", "-1", "True", "None", "'1'", "(1,)", "often", "1e999"])
def test_the_seconds_are_a_positive_number(after):
    with pytest.raises(InputError) as error:
        parse_straggler(f"drop(after={after})")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["", "late", "wait(after=1)", "balance()", "drop(after=1, until=2)", "drop(1)"])
def test_other_values_are_refused(text):
    with pytest.raises(InputError):
        parse_straggler(text)


def test_balance_is_measured_balance():
    assert balanced(Straggler("balance"), "equal") == "measured"
    assert balanced(Straggler(), "weights(2,1)") == "weights(2,1)"
