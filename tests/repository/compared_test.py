"""docs/guides/compared.md: each feature names a test that exists, or says that it is not here."""

import ast
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[2]


def rows():
    lines = (ROOT / "docs" / "guides" / "compared.md").read_text(encoding="utf-8").splitlines()
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return table[2:]  # without the header and the line below it


def functions(path):
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def test_there_are_27_features_with_a_test_each():
    assert len(rows()) == 27 and all(len(row) == 6 for row in rows())
    for feature, *_, ours, test in rows():
        assert bool(test) != (ours == "not yet"), feature


def test_the_tests_exist():
    for feature, *_, test in rows():
        if test:
            path, name = re.fullmatch(r"`(tests/\S+_test\.py)(?:::(test_\w+))?`", test).groups()
            assert (ROOT / path).is_file(), feature
            assert not name or name in functions(ROOT / path), feature
