"""What is said of programs is not contradicted by numbers.

FUZZ_EXAMPLES=20000 python -m pytest -m fuzz --hypothesis-profile=fuzz tests/row_semantics    # draws many more
"""

from collections.abc import Sequence

import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.row_semantics import oracle, programs

Batch = tuple[tuple[int, ...], str]
BATCHES: list[Batch] = [((1, 2, 4), "normal"), ((2, 4), "rare"), ((1, 1, 1), "ties"), ((1, 3, 5), "positive")]
BATCHES += [((1, 2, 4), "zeros"), ((2, 4), "negative"), ((1, 1, 1), "normal"), ((3, 3), "ties")]

_HALVED = ("unary", 0, 12, 0, [])  # x / 2 + 1
_ZEROS, _TO_INTEGERS, _SUM = ("unary", 0, 8, 0, []), ("to_int", 0, 0, 0, []), ("reduce", 0, 0, 0, [])
# Of conditions the second half of a body is left out in the other branch; odd numbers choose it for the replicated condition.
PROGRAMS = {
    "a condition of rows": [("cond", 0, 1, 0, [_HALVED, _HALVED])],
    "assigned under a condition of rows": [("cond", 0, 1, 0, [_HALVED, ("assign", 6, 1, 0, [])])],
    "assigned in a branch that is not taken": [
        ("cond", 0, 3, 0, [_HALVED, ("unary", 6, 8, 0, []), ("assign", 0, 0, 0, [])])
    ],
    "a sum and what it is added to": [("cond", 0, 3, 0, [_SUM, ("binary", 0, 0, 6, [])])],
    "a number of iterations that depends on rows": [("loop", 0, 0, 0, [_HALVED])],
    "assigned in such a loop": [("loop", 0, 0, 0, [("assign", 6, 1, 0, []), ("unary", 1, 13, 0, [])])],
    "added up in a loop": [("loop", 4, 1, 0, [("reduce", 2, 0, 0, []), ("binary", 0, 0, 1, [])])],
    "no iteration": [("unary", 4, 8, 0, []), _TO_INTEGERS, ("loop", 5, 0, 0, [("reduce", 3, 0, 0, [])])],
    "assigned zeros in a loop": [
        ("loop", 0, 1, 0, [("reduce", 2, 0, 0, []), ("assign", 0, 1, 0, []), ("unary", 2, 13, 0, [])])
    ],
    "another variable after an assignment": [
        _SUM,
        ("assign", 0, 0, 0, []),
        ("read", 0, 0, 0, []),
        ("assign", 0, 1, 0, []),
    ],
}


def contradictions(program: list[programs.Instruction], batches: Sequence[Batch], seed: int = 1) -> list[str]:
    traced = oracle.Traced(programs.function_of(program), *programs.SPECS)
    data = [(parts, [oracle.draw(spec, sum(parts), kind, seed) for spec in programs.SPECS]) for parts, kind in batches]
    return [found for parts, arguments in data for found in traced.contradictions(arguments, parts)]


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=list(PROGRAMS))
def test_programs_are_as_labelled(program: list[programs.Instruction]):
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
