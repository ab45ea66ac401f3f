"""Values of `--decay`."""

import subprocess
import sys

import pytest

from tfdist.errors import InputError
from tfdist.grammar.decay import (
    Cosine,
    CosineRestarts,
    Exponential,
    Linear,
    NoDecay,
    OneCycle,
    Own,
    Plateau,
    Polynomial,
    Step,
    normalized_decay,
    parse_decay,
)
from tfdist.grammar.spec import Spec


@pytest.mark.parametrize(
    ("text", "decay"),
    [
        ("none", NoDecay()),
        ("cosine", Cosine(0.0)),
        ("cosine(to=0.1)", Cosine(0.1)),
        ("linear(to=1)", Linear(1)),
        ("step(every=30)", Step(30, 0.1)),
        ("step(every=30, factor=0.5)", Step(30, 0.5)),
        ("cosine_restarts(first=10)", CosineRestarts(10, 2.0, 1.0, 0.0)),
        ("exponential", Exponential(0.01, 0)),
        ("exponential(every=10, factor=0.5)", Exponential(0.5, 10)),
        ("polynomial(to=0.1, power=2)", Polynomial(0.1, 2)),
        ("one_cycle(anneal=linear, pct_start=0.4)", OneCycle(0.4, anneal="linear")),
        ("plateau", Plateau("val_loss", "auto", 0.1, 10, 1e-4, 0, 0.0)),
        ("plateau(monitor=val_auc, mode=max, patience=2)", Plateau("val_auc", "max", patience=2)),
        ("plateau(monitor='loss')", Plateau("loss")),
        ("mine:rate(every=3)", Own(Spec("mine:rate", {"every": 3}))),
    ],
)
def test_reads(text, decay):
    assert parse_decay(text) == decay


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cosin", 'cosin is not a known decay. Did you mean "cosine"? Known: cosine, cosine_restarts, exponential, '),
        ("OneCycle", 'Did you mean "one_cycle"?'),
        ("exponential(factor=0)", "exponential: factor must be a number above 0 and at most 1. Received: 0."),
        ("exponential(every=1.5)", "every must be an integer of steps, or 0 for the length of the run, at least 0."),
        ("polynomial(power=0)", "polynomial: power must be a number above 0 and at most 1e+06. Received: 0."),
        ("cosine_restarts", "cosine_restarts needs a value for first."),
        (
            "cosine_restarts(first=9, t_mul=0.5)",
            "t_mul, unless it is 1, must be a number in [1.1, 1000]. Received: 0.5.",
        ),
        ("one_cycle(pct_start=1)", "one_cycle: pct_start must be a number above 0 and below 1. Received: 1."),
        ("one_cycle(div_factor=0.5)", "one_cycle: div_factor must be a finite number of at least 1. Received: 0.5."),
        ("one_cycle(anneal=cos)", "one_cycle: anneal must be cosine or linear. Received: 'cos'."),
        ("one_cycle(max_momentum=1)", "one_cycle: max_momentum must be a number in [0, 1). Received: 1."),
        ("one_cycle(cycle_momentum=0)", "cycle_momentum must be True or False. Received: 0."),
        ("plateau(factor=1)", "plateau: factor must be a number in [0, 1). Received: 1."),
        ("plateau(patience=2.5)", "plateau: patience must be an integer of evaluations, at least 0. Received: 2.5."),
        ("plateau(mode=up)", "plateau: mode must be auto, min or max. Received: 'up'."),
        ("plateau(monitor=3)", "plateau: monitor must be the name of a metric, such as val_loss. Received: 3."),
        ("plateau(val_loss)", "arguments are given by name"),
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


@pytest.mark.parametrize(
    "text", ["plateau(monitor='val_auc', mode='max')", "one_cycle(anneal='linear')", "mine:rate(mode=1)"]
)
def test_is_normalized_to_the_common_grammar(text):
    assert normalized_decay(text.replace("'", "")) == normalized_decay(text) == text


def test_imports_no_tensorflow():
    code = "import sys, tfdist.grammar.decay; sys.exit(bool({'tensorflow', 'keras', 'numpy'} & {*sys.modules}))"
    assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == 0
