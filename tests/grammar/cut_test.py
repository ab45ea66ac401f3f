import pytest

from tfdist.errors import InputError
from tfdist.grammar.cut import AfterLayers, Balanced, parse_cut


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("auto", Balanced("memory")),
        ("balanced(by=time)", Balanced("time")),
        (" balanced ( by='parameters' ) ", Balanced("parameters")),
        ("balanced()", Balanced("memory")),
        ("block_3", AfterLayers(("block_3",))),
        (" body/block_3 , block_7 ", AfterLayers(("body/block_3", "block_7"))),
    ],
)
def test_texts_are_parsed_and_repeated(text, expected):
    assert parse_cut(text) == expected
    assert parse_cut(str(expected)) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must be auto, balanced"),
        ("a,,b", "must be auto, balanced"),
        ("even(by=time)", "must be auto, balanced"),
        ("a,b,a", "a twice, in 'a,b,a'"),
        ("balanced(by=tme)", 'tme is not a measure. Did you mean "time"'),
        ("balanced(of='time')", 'has no parameter "of"'),
        ("balanced(by=time", "column"),
    ],
)
def test_others_are_refused_in_one_line(text, message):
    with pytest.raises(InputError) as refused:
        parse_cut(text)
    assert message in str(refused.value) and "\n" not in str(refused.value)
