"""Unique names, and the names that were wanted."""

from tfdist.grammar.unique_names import unique_names, without_mark


def test_names_are_numbered_and_found_again():
    named = unique_names([("dense/kernel", 1), ("dense/kernel", 2), ("dense/bias", 3), ("dense/kernel", 4)])
    assert named == {"dense/kernel": 1, "dense/kernel#2": 2, "dense/bias": 3, "dense/kernel#3": 4}
    assert {without_mark(name) for name in named} == {"dense/kernel", "dense/bias"}
