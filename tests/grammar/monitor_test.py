"""Which metric is watched, as text."""

import pytest

from tfdist.errors import InputError
from tfdist.grammar.monitor import Monitor, parse_best, parse_early_stopping


@pytest.mark.parametrize(
    ("text", "monitor"),
    [
        ("val_accuracy", Monitor("val_accuracy")),
        ("val_auc(mode=max)", Monitor("val_auc", "max")),
        ("val_auc(mode='min')", Monitor("val_auc", "min")),
        ("loss(mode=auto)", Monitor("loss")),
    ],
)
def test_the_metric_of_the_best(text, monitor):
    assert parse_best(text) == monitor
    assert parse_best(str(monitor)) == monitor


def test_early_stopping():
    stop = parse_early_stopping("val_loss(patience=4, min_delta=0.01, mode=min)")
    assert stop == Monitor("val_loss", "min", {"patience": 4, "min_delta": 0.01})
    assert parse_early_stopping(str(stop)) == stop
    assert parse_early_stopping("val_loss(min_delta=0)").args == {"min_delta": 0}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a name"),
        ("a:b", "must begin with the name of a metric"),
        ("val_loss(mode=up)", "val_loss(mode=up): mode must be min, max or auto. Received: 'up'"),
        ("val_loss(mode='up')", "mode must be min, max or auto"),
        ("val_loss(patience=-1)", "patience must be an integer of at least 0. Received: -1"),
        ("val_loss(patience=1.5)", "patience must be an integer"),
        ("val_loss(min_delta=True)", "min_delta must be a number of at least 0"),
        ("val_loss(patiense=1)", 'no parameter "patiense". Did you mean "patience"?'),
    ],
)
def test_what_is_refused(text, message):
    with pytest.raises(InputError) as caught:
        parse_early_stopping(text)
    assert message in str(caught.value)
