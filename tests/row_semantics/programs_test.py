"""What is said of drawn programs is not contradicted by numbers.

FUZZ_EXAMPLES=20000 python -m pytest -m fuzz --hypothesis-profile=fuzz tests/row_semantics    # tries many more
"""

import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.row_semantics import oracle, programs

BATCHES = [
    ((1, 2, 4), "normal"),
    ((2, 1), "ties"),
    ((3, 3), "rare"),
    ((1, 3, 5), "positive"),
    ((1, 2, 4), "zeros"),
    ((2, 4), "negative"),
]


def contradictions(program: list[programs.Instruction], parts: tuple[int, ...], kind: str, seed: int = 1) -> list[str]:
    traced = oracle.Traced(programs.function_of(program), *programs.SPECS)
    try:
        return traced.contradictions([oracle.draw(spec, sum(parts), kind, seed) for spec in programs.SPECS], parts)
    except tf.errors.OpError:  # shapes that do not fit for this number of rows
        return []


@pytest.mark.fuzz
@given(programs.PROGRAMS, st.sampled_from(BATCHES), st.integers(1, 1000))
@settings(max_examples=settings().max_examples if settings().max_examples > 100 else 30)
def test_drawn_programs_are_as_labelled(
    program: list[programs.Instruction], batch: tuple[tuple[int, ...], str], seed: int
):
    assert not contradictions(program, *batch, seed)
