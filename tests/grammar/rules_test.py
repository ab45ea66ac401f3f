"""The grammar of rules: the rule that applies to a variable, and invalid rules."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.errors import InputError
from tfdist.grammar.rules import first_match, parse_rules
from tfdist.grammar.spec import Spec

TEXT = "path=.*embedding.*: none; size>=10000: topk(ratio=0.05)|fp16; *: int8(bits=4)"


def chosen(text, path, size):
    rule = first_match(parse_rules(text), path, size)
    return None if rule is None else list(rule.methods)


@pytest.mark.parametrize(
    ("path", "size", "methods"),
    [
        ("model/embedding_1/table", 10**6, [Spec("none")]),
        ("model/dense/kernel", 10_000, [Spec("topk", {"ratio": 0.05}), Spec("fp16")]),
        ("model/dense/kernel", 9_999, [Spec("int8", {"bits": 4})]),
        ("a\nb", 1, [Spec("int8", {"bits": 4})]),
    ],
)
def test_the_first_that_holds_is_taken(path, size, methods):
    assert chosen(TEXT, path, size) == methods


def test_a_text_without_conditions_is_one_rule_for_all():
    [rule] = parse_rules(" powersgd(rank=4) ")
    assert rule.holds("any", 0)
    assert list(rule.methods) == [Spec("powersgd", {"rank": 4})]


def test_where_no_rule_holds_there_is_none():
    assert chosen("size>=10: int8", "v", 9) is None
    assert chosen("path=a: int8", "ab", 9) is None, "the whole path is matched"


@pytest.mark.parametrize(
    ("text", "path"),
    [("path=(a|b)/kernel : int8", "b/kernel"), ("path=[;:]+:int8", ";:"), ("path=(?:a|b)c: int8", "ac")],
)
def test_a_path_may_have_separators_in_brackets(text, path):
    assert chosen(text, path, 1) == [Spec("int8")]


def test_a_users_own_is_no_condition():
    assert chosen("my.package:Codec(text='a;b|c: d')", "v", 1) == [Spec("my.package:Codec", {"text": "a;b|c: d"})]
    assert chosen("*: my.package:Codec", "v", 1) == [Spec("my.package:Codec")]


@given(st.integers(0, 10**18 - 1), st.integers(0, 10**18 - 1))
def test_sizes(least, size):
    assert (chosen(f"size>={least}: int8", "v", size) is not None) == (size >= least)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no method"),
        (" ; ", "names no method"),
        ("*: ", "expected"),
        ("size>10: int8", "expected"),
        ("path=(: int8", "not a regular expression"),
        ("int8(bits=)", "column 11: "),
        ("int8|", "expected a name"),
    ],
)
def test_what_does_not_follow_the_grammar(text, message):
    with pytest.raises(InputError, match=message) as error:
        parse_rules(text)
    assert "\n" not in str(error.value)


def test_a_rule_is_written_as_its_methods():
    assert [str(rule) for rule in parse_rules(TEXT)] == ["none", "topk(ratio=0.05)|fp16", "int8(bits=4)"]
