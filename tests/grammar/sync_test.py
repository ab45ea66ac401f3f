"""`--sync`: what it accepts, and what it refuses in one line."""

import pytest

from tfdist.errors import InputError
from tfdist.grammar.sync import DiLoCo, EveryStep, LocalSGD, PostLocalSGD, parse_sync


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("every_step", EveryStep()),
        ("local_sgd", LocalSGD(period=8)),
        ("local_sgd(period=3, state=averaged)", LocalSGD(period=3, state="averaged")),
        ("post_local_sgd(warmup_steps=5)", PostLocalSGD(warmup_steps=5, period=8)),
        ("diloco(outer='adam(learning_rate=0.1)')", DiLoCo(period=50, outer="adam(learning_rate=0.1)")),
    ],
)
def test_texts(text, wanted):
    assert parse_sync(text) == wanted
    assert parse_sync(str(wanted)) == wanted


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("local", 'Did you mean "local_sgd"'),
        ("local_sgd(period=0)", "period must be a number of steps of at least 1, not 0"),
        ("local_sgd(period=2.5)", "period must be a number of steps of at least 1, not 2.5"),
        ("local_sgd(period=True)", "period must be a number of steps"),
        ("local_sgd(state=none)", "state must be one of local, averaged, reset"),
        ("local_sgd(every=3)", "every"),
        ("post_local_sgd", "warmup_steps"),
        ("diloco(outer='sgd')", "the outer optimizer needs its learning rate"),
        ("diloco(outer=3)", "outer must be an optimizer as a text"),
    ],
)
def test_wrong_texts(text, message):
    with pytest.raises(InputError) as error:
        parse_sync(text)
    assert message in str(error.value) and "\n" not in str(error.value)
