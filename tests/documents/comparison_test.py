"""What counts as the same output: times may differ, results may not."""

import pytest

from tests.documents import comparison

STEP = "step 45/45  epoch 2.00  train  loss 0.4634  accuracy 0.9278  19264 examples/s  0.0033 s/step"


@pytest.mark.parametrize(
    "expected, actual, is_same",
    [
        (STEP, STEP.replace("19264", "7").replace("0.0033", "1.2").replace("0.4634", "0.4712"), True),
        ("name   steps", "name steps", True),
        ("run ended at 12:01, 2026-11-26", "run ended at 7:59, 2027-01-02", True),
        ("Log: runs/launch-20261122-185829", "Log: runs/launch-20270101-000000", True),
        ("saved at step ... in runs/long", "saved at step 117 in runs/long", True),
        ("the largest difference is 6.55e-16 relative", "the largest difference is 1.2e-17 relative", True),
        ("85,932 bytes", "85,932 bytes", True),
        (STEP, STEP.replace("45/45", "44/45"), False),
        (STEP, STEP.replace("0.4634", "0.7634"), False),
        (STEP, STEP.replace("train", "eval"), False),
        ("85,932 bytes", "85,936 bytes", False),
        ("largest difference 6.55e-16", "largest difference 3.2e-03", False),
        ("saved at step ... in runs/long", "saved at step 117 in runs/short", False),
    ],
)
def test_same_line(expected: str, actual: str, is_same: bool):
    assert comparison.same_line(expected, actual) == is_same


def test_any_numbers():
    assert not comparison.same_line("all_reduce 4 1.58", "all_reduce 4 9.31")
    assert comparison.same_line("all_reduce 4 1.58", "all_reduce 4 9.31", any_numbers=True)
    assert not comparison.same_line("all_reduce 4 1.58", "all_gather 4 1.58", any_numbers=True)


@pytest.mark.parametrize(
    "expected, actual, is_same",
    [
        ("... b", "a b", True),
        ("... b", "b", True),
        ("a ... b", "a x y b", True),
        ("a b", "a x b", False),
        ("a ...", "a", True),
        ("a", "a b", False),
        ("... b ...", "a c", False),
        ("...", "", True),
    ],
)
def test_dots_stand_for_any_lines(expected: str, actual: str, is_same: bool):
    assert comparison.same(expected.split(), actual.split()) == is_same
