"""Values of `--decay`."""

import subprocess
import sys

import pytest

from tfdist.errors import InputError
from tfdist.grammar.decay import Cosine, Linear, NoDecay, Step, parse_decay


@pytest.mark.parametrize(
    ("text", "decay"),
    [
        ("none", NoDecay()),
        ("cosine", Cosine(0.0)),
        ("cosine(to=0.1)", Cosine(0.1)),
        ("linear(to=1)", Linear(1)),
        ("step(every=30)", Step(30, 0.1)),
        ("step(every=30, factor=0.5)", Step(30, 0.5)),
    ],
)
def test_reads(text, decay):
    assert parse_decay(text) == decay


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cosin", 'cosin is not a known decay. Did you mean "cosine"? Known: cosine, linear, none, step.'),
        ("cosine(too=0.1)", 'cosine has no parameter "too". Received: cosine(too=0.1). Did you mean "to"?'),
        ("cosine(to=1.5)", "cosine: to must be a number in [0, 1]. Received: 1.5."),
        ("linear(to=None)", "linear: to must be a number in [0, 1]. Received: None."),
        ("linear(to=True)", "linear: to must be a number in [0, 1]. Received: True."),
        ("step", "step needs a value for every."),
        ("step(every=0)", "step: every must be an integer of steps, at least 1. Received: 0."),
        ("step(every=2.5)", "at least 1. Received: 2.5."),
        ("step(every=2, factor=-1)", "step: factor must be a number in [0, 1]. Received: -1."),
        ("none(to=1)", 'none has no parameter "to"'),
    ],
)
def test_refuses(text, message):
    with pytest.raises(InputError) as caught:
        parse_decay(text)
    assert message in str(caught.value)


def test_imports_no_tensorflow():
    code = "import sys, tfdist.grammar.decay; sys.exit(bool({'tensorflow', 'keras', 'numpy'} & {*sys.modules}))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
