"""What `--find` accepts, its normal form, and errors of one line."""

import numpy as np
import pytest

from tfdist.errors import InputError
from tfdist.grammar.search import BatchSizeSearch, LearningRateSearch, parse_search, search_text


@pytest.mark.parametrize(
    ("text", "expected", "normal"),
    [
        ("learning_rate", LearningRateSearch(), "learning_rate"),
        ("learning_rate(max=1, steps=50)", LearningRateSearch(max=1, steps=50), "learning_rate(max=1, steps=50)"),
        ("batch_size", BatchSizeSearch(), "batch_size"),
        ("batch_size(memory=2GiB)", BatchSizeSearch(memory=2**31), "batch_size(memory='2GiB')"),
        ("batch_size( memory = 1.5 MB )", BatchSizeSearch(memory=3 * 2**19), "batch_size(memory='1.5 MB')"),
        ("batch_size(memory=1000)", BatchSizeSearch(memory=1000), "batch_size(memory=1000)"),
        (
            "batch_size(processes=2,launcher=horovod)",
            BatchSizeSearch(processes=2, launcher="horovod"),
            "batch_size(processes=2, launcher='horovod')",
        ),
    ],
)
def test_searches(text, expected, normal):
    assert parse_search(text) == parse_search(normal) == expected
    assert search_text(text) == search_text(normal) == normal


def test_numbers_of_numpy():
    assert str(LearningRateSearch(max=np.float64(1), steps=np.int64(50))) == str(LearningRateSearch(max=1.0, steps=50))
    assert str(BatchSizeSearch(max=np.int64(8))) == str(BatchSizeSearch(max=8))


def test_no_search():
    assert search_text("") == ""
    assert BatchSizeSearch().memory_bytes is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr", "lr cannot be searched for. Known: batch_size, learning_rate."),
        ("learning_rat", 'learning_rat cannot be searched for. Did you mean "learning_rate"?'),
        ("learning_rate(start=1)", 'learning_rate has no parameter "start". Known: max, min, steps.'),
        ("learning_rate(min=1, max=0.1)", "min must be less than max. Received: min=1, max=0.1."),
        ("learning_rate(min=0)", "min must be a learning rate greater than 0. Received: 0."),
        ("learning_rate(max='1')", "max must be a learning rate greater than 0. Received: '1'."),
        ("learning_rate(steps=9)", "steps must be an integer of at least 10. Received: 9."),
        ("learning_rate(steps=20.0)", "steps must be an integer of at least 10. Received: 20.0."),
        (
            "batch_size(memory=2Gig)",
            "memory must be a number of bytes above 0, such as 512, 64KB or 2GiB; KB and KiB are",
        ),
        ("batch_size(memory=2Gig)", "Received: '2Gig'."),
        ("batch_size(memory=0)", "Received: 0."),
        ("batch_size(memory=True)", "memory must be a number of bytes"),
        ("batch_size(processes=0)", "processes must be an integer of at least 1. Received: 0."),
        ("batch_size(steps=2)", "steps must be an integer of at least 4. Received: 2."),
        ("batch_size(max=-1)", "max must be an integer of at least 0. Received: -1."),
        ("batch_size(", "column 11"),
    ],
)
def test_errors(text, message):
    with pytest.raises(InputError) as error:
        search_text(text)
    assert message in str(error.value) and "\n" not in str(error.value)
