"""What is said of operations on operands of all labels is not contradicted by numbers; what wrong rules say is.

python -m pytest -m full tests/row_semantics    # tries the wrong rules of mutants.tsv, which takes minutes
"""

import importlib
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest

import tfdist.row_semantics
from tests.row_semantics import operations, oracle
from tfdist.row_semantics.rules import RULES

CALLS = operations.calls()
GROUPS = [sorted(CALLS)[number::24] for number in range(24)]
# Uneven parts, among them parts of one row, and of as many rows as an axis has that is no axis of rows.
BATCHES = (((1, 2, 4), "normal"), ((1, 3, 5), "ties"), ((3, 3), "positive"), ((1, 1, 1), "rare"))
# A file, types of operations, a text in the file, and what replaces it.
MUTANTS = [line.split("\t") for line in Path(__file__).with_name("mutants.tsv").read_text("utf-8").splitlines()]


@pytest.mark.parametrize("kinds", GROUPS, ids=lambda kinds: kinds[0])
def test_operations_are_as_labelled(kinds: list[str]):
    for kind in kinds:
        traced = oracle.Traced(operations.of_calls(*CALLS[kind]), *operations.SPECS)
        types = {operation.type for operation in traced.operations}
        assert kind in types or kind in ("WriteScalarSummary", "WriteSummary")  # of files
        for parts, data in BATCHES:
            assert not traced.contradictions(oracle.draw(operations.SPECS, sum(parts), data, 1), parts)


def test_each_rule_has_a_call():
    assert not RULES.keys() - CALLS.keys()


@pytest.mark.full
@pytest.mark.parametrize("mutant", MUTANTS, ids=[f"{number}-{mutant[0]}" for number, mutant in enumerate(MUTANTS)])
def test_a_wrong_rule_is_contradicted(mutant: list[str], monkeypatch: pytest.MonkeyPatch):
    name, kinds, text, replacement = [each.replace("\\n", "\n") for each in mutant]
    path = Path(tfdist.row_semantics.__file__).parent / name
    assert path.read_text("utf-8").count(text) == 1
    code = compile(path.read_text("utf-8").replace(text, replacement), str(path), "exec")
    load = SourceFileLoader.get_code
    monkeypatch.setattr(SourceFileLoader, "get_code", lambda self, n: code if self.path == str(path) else load(self, n))
    for module in [each for each in sys.modules if each.startswith(("tfdist.row_semantics", "tests.row_semantics"))]:
        monkeypatch.delitem(sys.modules, module)
    names = ("operations", "programs", "partitioning")
    mutated = [importlib.import_module(f"tests.row_semantics.{each}_test") for each in names]
    if name == "partitioning.py":
        with pytest.raises((Exception, pytest.fail.Exception)):
            for program in mutated[2].WRITTEN.values():
                mutated[2].test_results_are_those_of_one_device(program)
        return
    with pytest.raises(AssertionError):
        mutated[0].test_operations_are_as_labelled(kinds.split())
        for program in mutated[1].WRITTEN.values():
            mutated[1].test_programs_are_as_labelled(program)
        mutated[1].test_a_number_of_rows_that_is_traced_is_no_number_of_rows()
