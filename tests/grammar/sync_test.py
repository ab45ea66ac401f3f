"""`--sync`: what it accepts, and what it refuses in one line."""

import pytest

from tfdist.errors import InputError
from tfdist.grammar.sync import EASGD, Adaptive, DiLoCo, EveryStep, FedAvg, LocalSGD, PostLocalSGD, SlowMo, parse_sync


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("every_step", EveryStep()),
        ("local_sgd", LocalSGD(period=8)),
        ("local_sgd(period=3, state=averaged)", LocalSGD(period=3, state="averaged")),
        ("post_local_sgd(warmup_steps=5)", PostLocalSGD(warmup_steps=5, period=8)),
        ("local_sgd(overlap=True)", LocalSGD(overlap=True)),
        ("diloco(fragments=4, delay=3, mixing=0.25)", DiLoCo(fragments=4, delay=3, mixing=0.25)),
        ("diloco(outer='adam(learning_rate=0.1)')", DiLoCo(period=50, outer="adam(learning_rate=0.1)")),
        ("easgd", EASGD(period=10)),
        ("easgd(period=4, alpha=0.1)", EASGD(period=4, alpha=0.1)),
        ("slowmo(momentum=0.5, state=reset)", SlowMo(period=12, momentum=0.5, learning_rate=1.0, state="reset")),
        ("adaptive(rule=qsr, alpha=0.2)", Adaptive(rule="qsr", alpha=0.2, period=8)),
        ("adaptive(rule=adacomm, interval=50, period=20)", Adaptive(rule="adacomm", interval=50, period=20)),
        ("fedavg", FedAvg(clients=100, fraction=0.1, local_epochs=1, outer="sgd(learning_rate=1.0)")),
        (
            "fedavg(clients=8, shards_per_client=2, client_sizes=power_law)",
            FedAvg(clients=8, shards_per_client=2, client_sizes="power_law"),
        ),
        ("fedavg(proximal=0.01)", FedAvg(proximal=0.01)),
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
        ("local_sgd(delay=-1)", "delay must be a number of steps of at least 0, not -1"),
        ("local_sgd(period=4, delay=5)", "delay must be at most the period, 4 steps, not 5"),
        ("local_sgd(overlap=1)", "overlap must be True or False, not 1"),
        ("local_sgd(overlap=True, state=reset)", "state=reset needs exchanges of all weights at once"),
        ("diloco(period=10, fragments=3, delay=4)", "delay must be at most period / fragments, 3 steps, not 4"),
        ("diloco(period=3, fragments=4)", "fragments must be at most the period of 3 steps, not 4"),
        ("diloco(fragments=0)", "fragments must be a number of parts of at least 1, not 0"),
        ("diloco(mixing=1.5)", "mixing must be a number from 0 to 1, not 1.5"),
        ("diloco(mixing=half)", "mixing"),
        ("local_sgd(fragments=2)", "fragments"),
        ("fedavg(clients=0)", "clients must be a number of clients of at least 1, not 0"),
        ("fedavg(fraction=0)", "fraction must be a number in (0, 1], not 0"),
        ("fedavg(fraction=1.5)", "fraction must be a number in (0, 1], not 1.5"),
        ("fedavg(fraction=True)", "fraction must be a number in (0, 1]"),
        ("fedavg(local_epochs=0)", "local_epochs must be a number of epochs of at least 1, not 0"),
        ("fedavg(shards_per_client=-1)", "shards_per_client must be a number of shards of at least 0, not -1"),
        ("fedavg(client_sizes=random)", "client_sizes must be one of equal, power_law"),
        ("fedavg(proximal=-1)", "proximal must be a number of at least 0, not -1"),
        ("fedavg(outer='adam')", "the outer optimizer needs its learning rate"),
        ("fedavg(period=8)", "period"),
        ("diloco(outer='sgd')", "the outer optimizer needs its learning rate"),
        ("diloco(outer=3)", "outer must be an optimizer as a text"),
        ("easgd(alpha=0)", "alpha must be a number above 0 and below 1, not 0"),
        ("easgd(alpha=1.5)", "alpha must be a number above 0 and below 1, not 1.5"),
        ("easgd(alpha='x')", "alpha must be a number above 0 and below 1, not 'x'"),
        ("easgd(state=reset)", 'easgd has no parameter "state"'),
        ("slowmo(momentum=1)", "momentum must be a number of at least 0 and below 1, not 1"),
        ("slowmo(learning_rate=0)", "learning_rate must be a number above 0, not 0"),
        ("slowmo(learning_rate=None)", "learning_rate must be a number above 0, not None"),
        ("adaptive", "adaptive needs a value for rule"),
        ("adaptive(rule=loss)", "rule must be one of adacomm, qsr, divergence, not 'loss'"),
        ("adaptive(rule=qsr)", "rule=qsr needs alpha"),
        ("adaptive(rule=adacomm, alpha=0.1)", "alpha is for rule=qsr, not for rule=adacomm"),
        ("adaptive(rule=divergence, target=-1)", "target must be a number above 0, not -1"),
        ("adaptive(rule=divergence, max_period=4)", "max_period must be a number of steps of at least 8, not 4"),
        ("adaptive(rule=adacomm, interval=0)", "interval must be a number of steps of at least 1, not 0"),
    ],
)
def test_wrong_texts(text, message):
    with pytest.raises(InputError) as error:
        parse_sync(text)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "sizes", "offsets", "delays", "kept"),
    [
        ("local_sgd", [9], [0], [0], None),
        ("local_sgd(period=1, overlap=True)", [9], [0], [1], None),
        ("local_sgd(period=8, overlap=True)", [9], [0], [8], None),
        ("local_sgd(period=8, overlap=True, delay=3)", [9], [0], [3], None),
        ("diloco", [9], [0], [0], 0.0),
        ("diloco(fragments=4)", [6, 3, 3, 0], [0, 12, 25, 37], [0, 0, 0, 0], 0.0),
        ("diloco(fragments=4, overlap=True, delay=7)", [6, 3, 3, 0], [0, 12, 25, 37], [7, 7, 7, 7], 0.5),
        ("diloco(fragments=4, overlap=True)", [3, 3, 3, 3], [0, 13, 25, 37], [13, 12, 12, 13], 0.5),
        ("diloco(fragments=4, overlap=True)", [6, 3, 3, 0], [0, 24, 36, 49], [24, 12, 13, 1], 0.5),
        ("diloco(period=4, fragments=4, overlap=True)", [9, 1, 1, 1], [0, 1, 2, 3], [1, 1, 1, 1], 0.5),
        ("diloco(delay=3, mixing=0)", [9], [0], [3], 0),
    ],
)
def test_when_fragments_are_sent_and_used(text, sizes, offsets, delays, kept):
    sync = parse_sync(text)
    assert sync.offsets(sizes) == offsets
    assert sync.delays(sync.offsets(sizes)) == delays
    assert sync.effective_mixing == kept


def test_the_examples_of_a_round():
    assert FedAvg().drawn == 10
    assert FedAvg(clients=10, fraction=0.01).drawn == 1
    assert FedAvg(local_epochs=5).examples_per_step(60000, 10) == 30000
    assert FedAvg(clients=3, fraction=1).examples_per_step(10, 4) == 10
    assert EveryStep().examples_per_step(60000, 10) == 10
