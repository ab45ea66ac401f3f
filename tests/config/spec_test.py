"""Compound values and rules: their grammar, positions of errors, lists and names of them, loading and calling objects."""

import functools
import keyword
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.config import spec
from tfdist.config.rules import first_match, parse_rules, parse_specs, split_at_commas
from tfdist.config.spec import Spec, call_user_function, remove_mark, unique_names
from tfdist.errors import InputError, NotFiniteError, did_you_mean, nearest

_names = st.from_regex(r"[A-Za-z0-9_.:/-]+", fullmatch=True)
_keys = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]*", fullmatch=True).filter(lambda key: not keyword.iskeyword(key))
_numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
_leaves = st.none() | st.booleans() | _numbers | st.text() | st.binary()
_values = st.recursive(
    _leaves,
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.tuples(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(st.builds(Spec, _names, st.dictionaries(_keys, _values, max_size=4)))
def test_what_is_written_is_read_back(written):
    assert spec.parse(str(written)) == written


@pytest.mark.parametrize(
    ("text", "args"),
    [
        ("a(mode=max)", {"mode": "max"}),
        ("a(k=1, mode = max ,memory=1.5 GiB)", {"k": 1, "mode": "max", "memory": "1.5 GiB"}),
        ("a(memory=1000, mode='min')", {"memory": 1000, "mode": "min"}),
        ("a(k='mode=max, x', mode=max)", {"k": "mode=max, x", "mode": "max"}),
        ("""a(k='it\\'s (mode=max)', j="mode=max)")""", {"k": "it's (mode=max)", "j": "mode=max)"}),
    ],
)
def test_words_need_no_quotes_where_they_are_allowed(text, args):
    assert spec.parse(text, words=("mode", "memory")).args == args


@pytest.mark.parametrize("text", ["a(anymode=max)", "a(other=max)", "a(mode=max + 1)", "a(memory=2 Gi B)"])
def test_other_values_need_quotes(text):
    with pytest.raises(InputError, match="column"):
        spec.parse(text, words=("mode", "memory"))


@pytest.mark.parametrize(
    ("text", "name", "args"),
    [
        ("mirrored", "mirrored", {}),
        (" sgd ( ) ", "sgd", {}),
        ("sgd(momentum=0.9, nesterov=True)", "sgd", {"momentum": 0.9, "nesterov": True}),
        ("sgd(\n  momentum = -1e-3,\n)", "sgd", {"momentum": -1e-3}),
        ("my.models-2:Net.s(width=(1, 2), tag='a,)=(#')", "my.models-2:Net.s", {"width": (1, 2), "tag": "a,)=(#"}),
        ("tfds:mnist/3.0.1(split='it\\'s')", "tfds:mnist/3.0.1", {"split": "it's"}),
        ("a(x={'k': [1, {2}]}, y=None)", "a", {"x": {"k": [1, {2}]}, "y": None}),
    ],
)
def test_reads(text, name, args):
    assert spec.parse(text) == Spec(name, args)


@pytest.mark.parametrize(
    ("text", "column", "problem"),
    [
        ("", 1, "expected a name"),
        ("(x=1)", 1, "expected a name"),
        ("sgd(momentum=)", 14, ""),
        ("sgd(momentum)", 5, "expected key=value, arguments are passed by name"),
        ("sgd(0.9)", 5, "expected key=value, arguments are passed by name"),
        ("sgd(**x)", 5, "expected key=value"),
        ("sgd(", 4, "'(' was never closed"),
        ("sgd(x=1) y", 10, ""),
        ("sgd(x=1)(y=2)", 4, 'expected the end after the first ")"'),
        ("sgd momentum", 5, 'expected "(" or the end'),
        ("sgd(x=1, x=2)", 10, '"x" is specified twice'),
        ("sgd(é='ü', x=y)", 14, "expected a Python literal, not y"),
        ("sgd(x=nesterov)", 7, "expected a Python literal, not nesterov"),
        ("sgd(x=f(1))", 7, "expected a Python literal, not f(1)"),
        ("sgd(x=__import__('os'))", 7, "expected a Python literal"),
        ("sgd(x={[]: 1})", 7, "expected a Python literal"),
        ("sgd(x=1e999)", 7, "expected a Python literal"),
        ("sgd(x=[1, 2)", 12, "closing parenthesis ')' does not match opening parenthesis '['"),
        ("sgd(x=\n1,\ny=z)", 13, "expected a Python literal, not z"),
        ("sgd(x=" + "(" * 500 + ")" * 500 + ")", 206, ""),
    ],
)
def test_marks_the_place(text, column, problem):
    with pytest.raises(InputError) as caught:
        spec.parse(text)
    message = str(caught.value)
    assert f"-- column {column}: {problem}" in message
    assert "The grammar is name" in message
    assert len(message.splitlines()) == 1


@given(st.text())
def test_any_text_is_read_or_refused_in_one_line(text):
    try:
        spec.parse(text)
    except InputError as error:
        assert "\n" not in str(error) and "\r" not in str(error)


def test_nearest():
    known = ["single", "mirrored", "horovod"]
    assert nearest("Mirored", known) == ' Did you mean "mirrored"? Known: horovod, mirrored, single.'
    assert nearest("xyz", known) == " Known: horovod, mirrored, single."
    assert nearest("sgd", ["SGD"]) == ' Did you mean "SGD"? Known: SGD.'
    assert nearest("xyz", []) == " Known: none."
    assert did_you_mean("Mirored", known) == ' Did you mean "mirrored"?'
    assert did_you_mean("xyz", known) == ""


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    """Writes modules into a new current directory, and unloads them afterwards."""
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield lambda name, text: (tmp_path / f"{name}.py").write_text(text)
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(sys.modules[name].__file__):
            del sys.modules[name]


def test_loads_from_the_current_directory(own_module):
    own_module("own_good", "class Net:\n  size = 3\n")
    assert spec.load_object("own_good:Net.size") == 3


@pytest.mark.parametrize(
    ("module", "name", "message"),
    [
        ("", "own_bad", 'named package.module:name. Received: "own_bad"'),
        ("", "own_bad:", "named package.module:name"),
        ("", ":f", "named package.module:name"),
        ("", "own bad:f", "named package.module:name"),
        ("", "own_absent:f", "ModuleNotFoundError: No module named 'own_absent'. The current directory"),
        ("import own_absent_too", "own_bad:f", "ModuleNotFoundError: No module named 'own_absent_too'"),
        ("raise RuntimeError('first\\nsecond')", "own_bad:f", "RuntimeError: first second"),
        ("def f(:", "own_bad:f", "SyntaxError"),
        ("raise SystemExit(3)", "own_bad:f", "SystemExit: 3"),
        ("def function(): pass", "own_bad:funktion", 'there is no funktion in it. Did you mean "function"?'),
    ],
)
def test_refuses_to_load(own_module, module, name, message):
    own_module("own_bad", module)
    with pytest.raises(InputError) as caught:
        spec.load_object(name)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def _function(width, depth=2, *, seed=0):
    return width, depth, seed


def _open_ended(width, **rest):
    if rest:
        raise ValueError(f"Argument(s) not recognized: {rest}")
    return width


def test_calls_with_the_arguments_that_fit():
    assert spec.call(_function, Spec("f", {"width": 8}), seed=5, other=1) == (8, 2, 5)
    assert spec.call(_function, Spec("f", {"seed": 6}), width=4, seed=5) == (4, 2, 6)
    assert spec.call(_open_ended, Spec("f", {"width": 8}), seed=5) == 8
    assert spec.call(lambda **rest: rest, Spec("f", {"x": 1}), seed=5) == {"x": 1}


@pytest.mark.parametrize(
    ("function", "args", "message"),
    [
        (_function, {"widht": 8}, 'f has no parameter "widht". Received: f(widht=8). Did you mean "width"? Known: d'),
        (_function, {"depth": 8}, "f needs a value for width. Received: f(depth=8)."),
        (lambda x, /: x, {"x": 8}, 'f has no parameter "x". Received: f(x=8). Known: none.'),
        (
            dict,
            {"x": 8},
            "f must be a function with a signature that Python can inspect. Received: ValueError: no signature found",
        ),
        (_open_ended, {"width": 1, "widht": 8}, "ValueError: Argument(s) not recognized: {'widht': 8}. Did you mean"),
    ],
)
def test_refuses_to_call(function, args, message):
    with pytest.raises(InputError) as caught:
        spec.call(function, Spec("f", args))
    assert message in str(caught.value)


def test_an_error_inside_the_function_passes_through():
    def broken(width):
        raise ValueError("inside")

    with pytest.raises(ValueError, match="^inside$"):
        spec.call(broken, Spec("f", {"width": 1}))


def test_specs_are_separated_by_commas():
    assert parse_specs("") == []
    wanted = [Spec("a"), Spec("b", {"c": (1, 2), "d": "x,)y"}), Spec("e.f:g")]
    assert parse_specs("a, b(c=(1, 2), d='x,)y') ,e.f:g") == wanted


def test_parts_need_not_be_specs():
    assert split_at_commas("model=cnn(filters=(4, 8)),,status=*") == ["model=cnn(filters=(4, 8))", "status=*"]


def test_names_are_numbered_and_found_again():
    named = unique_names([("dense/kernel", 1), ("dense/kernel", 2), ("dense/bias", 3), ("dense/kernel", 4)])
    assert named == {"dense/kernel": 1, "dense/kernel#2": 2, "dense/bias": 3, "dense/kernel#3": 4}
    assert {remove_mark(name) for name in named} == {"dense/kernel", "dense/bias"}


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
        call_user_function("--model", function, Spec("own:name"))
    message = str(caught.value)
    assert message.startswith(
        f"--model=own:name must not fail. Received: KeyError: 'first\\nsecond' ({__file__}, line "
    )
    assert "\n" not in message


def test_a_builtin_has_no_line_of_its_own():
    with pytest.raises(InputError, match=r"Received: TypeError: len\(\) takes exactly one argument .*spec.py, line"):
        call_user_function("--dataset", len, Spec("builtins:len"))


@pytest.mark.parametrize("error", [NotFiniteError("Step 3."), MemoryError("no more")])
def test_errors_with_a_meaning_pass_through(error):
    def function():
        raise error

    with pytest.raises(type(error)):
        call_user_function("--model", function, Spec("own:name"))


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
    assert rule.applies_to("any", 0)
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
