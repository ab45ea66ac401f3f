"""What is said of programs is not contradicted by numbers.

FUZZ_EXAMPLES=20000 python -m pytest -m fuzz --hypothesis-profile=fuzz tests/row_semantics    # draws many more
"""

import pathlib
from collections.abc import Sequence

import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.row_semantics import oracle, programs
from tfdist.row_semantics.explanation import record_static_row_reads

Batch = tuple[tuple[int, ...], str]
BATCHES: list[Batch] = [((1, 2, 4), "normal"), ((2, 4), "rare"), ((1, 1, 1), "ties"), ((1, 3, 5), "positive")]
BATCHES += [((1, 2, 4), "zeros"), ((2, 4), "negative"), ((1, 1, 1), "normal"), ((3, 3), "ties")]

_LINES = pathlib.Path(__file__).with_name("written.tsv").read_text("utf-8").splitlines()
WRITTEN = dict(line.split("\t") for line in _LINES)


def contradictions(program: list[programs.Instruction] | str, batches: Sequence[Batch], seed: int = 1) -> list[str]:
    traced = oracle.Traced(programs.function_of(program), *programs.SPECS)
    data = [(parts, oracle.draw(programs.SPECS, sum(parts), kind, seed)) for parts, kind in batches]
    return [found for parts, arguments in data for found in traced.contradictions(arguments, parts)]


@pytest.mark.parametrize("program", WRITTEN.values(), ids=list(WRITTEN))
def test_programs_are_as_labelled(program: str):
    assert not contradictions(program, BATCHES[:4])


@pytest.mark.fuzz
@given(programs.PROGRAMS, st.integers(1, 1000))
@settings(max_examples=settings().max_examples if settings().max_examples > 100 else 25)
def test_drawn_programs_are_as_labelled(program: list[programs.Instruction], seed: int):
    assert not contradictions(program, [BATCHES[seed % 5], BATCHES[5 + seed % 3]], seed)


def test_a_number_of_rows_that_is_traced_is_no_number_of_rows():
    fixed = tf.TensorSpec((7, 3), tf.float64)
    for function, spec in ((tf.square, fixed), (lambda x: tf.ensure_shape(x, [7, 3]), programs.SPECS[0])):
        assert str(oracle.Traced(function, spec).results[0].label) == "all rows"


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ("x * (x.shape[0] or 2)", 1),
        ("n, *_ = x.shape; x * (n or 2)", 1),
        ("n, columns = x.shape; x * columns", 0),
        ("x * (x.get_shape().as_list()[0] or 2)", 1),
        ("x * x.shape.as_list()[-1]", 0),
        ("[dim or -1 for dim in x.shape.as_list()]", 0),
    ],
)
def test_reads_of_a_static_number_of_rows_are_noted(code: str, count: int):
    with record_static_row_reads() as notes, tf.Graph().as_default():
        exec(compile(code, __file__, "exec"), {"x": tf.compat.v1.placeholder(tf.float32, [None, 3])})
    assert len(notes) == count
