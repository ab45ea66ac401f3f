"""What is said of operations on operands of all labels is not contradicted by numbers; each with a rule has a call."""

import pytest

from tests.row_semantics import operations, oracle
from tfdist.row_semantics.rules import RULES

CALLS = operations.calls()
GROUPS = [sorted(CALLS)[number::24] for number in range(24)]
# Uneven parts, among them parts of one row, and of as many rows as an axis has that is no axis of rows.
BATCHES = (((1, 2, 4), "normal"), ((1, 3, 5), "ties"), ((3, 3), "positive"), ((2, 1), "rare"))


@pytest.mark.parametrize("kinds", GROUPS, ids=lambda kinds: kinds[0])
def test_operations_are_as_labelled(kinds: list[str]):
    for kind in kinds:
        traced = oracle.Traced(operations.of_calls(*CALLS[kind]), *operations.SPECS)
        types = {operation.type for operation in traced.operations}
        assert kind in types or kind in ("WriteScalarSummary", "WriteSummary")  # of files
        for parts, data in BATCHES:
            arguments = [oracle.draw(spec, sum(parts), data, 1) for spec in operations.SPECS]
            assert not traced.contradictions(arguments, parts)


def test_each_rule_has_a_call():
    assert not RULES.keys() - CALLS.keys()
