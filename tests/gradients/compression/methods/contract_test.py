"""What holds for all methods: see `check_contract`. Codecs that are no reducers are in all_gather_reducer_test.py, too."""

import numpy as np
import pytest

from tests.selection import quick

METHODS = [
    "fp16",
    "bf16",
    "dgc(ratio=0.1, momentum=0.5, clip_norm=2.0, warmup_steps=3)",
    "powersgd",
    "powersgd(rank=1)",
    "projection(ratio=0.3)",
    "randomk(ratio=0.3)",
    "randomk(ratio=0.6, unbiased=True)",
    "sketch(columns=20, rows=3, k=5)",
    "threshold(value=1.0)",
    "topk(ratio=0.1)",
    "topk(ratio=0.3, method='sampled')",
    "topk(ratio=0.1) | fp16",
]


@pytest.mark.parametrize("text", quick(METHODS, *METHODS[:4], *METHODS[5:]))
def test_contract(check_contract, text):
    steps = check_contract(text)
    first, second = (step.totals[0][2] for step in steps[:2])
    if text.startswith(("projection", "randomk", "sketch")):
        assert [int(state[-1]) for state in steps[-1].state] == [5] * 4
    if text.startswith("projection"):
        assert not np.array_equal(first, second), "each step draws anew"
    if text.startswith("randomk"):
        assert not np.array_equal(first != 0, second != 0), "each step draws anew"
    if text.startswith("sketch"):
        assert np.count_nonzero(first) == 5
