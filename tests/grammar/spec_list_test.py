import pytest

from tfdist.errors import InputError
from tfdist.grammar.spec import Spec
from tfdist.grammar.spec_list import parse_specs, split_outside


def test_specs_are_separated_by_commas():
    assert parse_specs("") == []
    assert parse_specs("a, b(c=(1, 2), d='x,)y') ,e.f:g") == [
        Spec("a"),
        Spec("b", {"c": (1, 2), "d": "x,)y"}),
        Spec("e.f:g"),
    ]


def test_parts_need_not_be_specs():
    assert split_outside("model=cnn(filters=(4, 8)),,status=*") == ["model=cnn(filters=(4, 8))", "status=*"]


@pytest.mark.parametrize(("text", "message"), [("a,b,a(x=1)", "a is given twice"), ("a,b(", "column 2")])
def test_what_is_refused(text, message):
    with pytest.raises(InputError, match=message):
        parse_specs(text)
