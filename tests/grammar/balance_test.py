import pytest

from tfdist.errors import InputError
from tfdist.grammar.balance import Balance, parse_balance


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("equal", Balance("equal")),
        ("measured", Balance("measured")),
        ("weights(2,1,1)", Balance("weights", (2.0, 1.0, 1.0))),
        (" weights( 2 , 0.5 ) ", Balance("weights", (2.0, 0.5))),
        ("weights(3)", Balance("weights", (3.0,))),
    ],
)
def test_texts_are_parsed_and_repeated(text, expected):
    assert parse_balance(text) == expected
    assert parse_balance(str(expected)) == expected


@pytest.mark.parametrize(
    "text",
    [
        "weights",
        "weights()",
        "weights(2,)",
        "weights(2,0)",
        "weights(2,-1)",
        "weights(2,nan)",
        "weights(1,inf)",
        "weights(1,1e-9)",
        "weights(a=1)",
        "weights([2,1])",
    ],
)
def test_weights_are_positive_numbers(text):
    with pytest.raises(InputError, match="must have a positive number for each replica"):
        parse_balance(text)


def test_the_least_weight_is_said():
    with pytest.raises(
        InputError, match="for each replica, at least 1e-06 of the largest, in the order of their ranks"
    ):
        parse_balance("weights(1,1e-9)")


@pytest.mark.parametrize("text", ["", "mesured", "weights(2,1", "2,1", "weights(2,1) "[:-2], "equal()x"])
def test_other_texts_are_errors_that_list_what_is_known(text):
    with pytest.raises(InputError, match=r"is not known\..*Known: equal, measured, weights\(2,1,1\)"):
        parse_balance(text)


def test_only_weights_have_arguments():
    with pytest.raises(InputError, match="measured has no arguments"):
        parse_balance("measured(every=10)")
