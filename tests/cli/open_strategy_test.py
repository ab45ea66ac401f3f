"""Opening a strategy for a command."""

import dataclasses
import math
import sys
import types

import pytest
from tfdist.strategies.mirrored import Mirrored

from tfdist.cli import open_strategy
from tfdist.config.train_config import TrainConfig
from tfdist.coordination import LocalGroup
from tfdist.errors import InputError, NotFiniteError, Preempted


@pytest.fixture
def agreed(monkeypatch):
    """The values that the processes have compared, by name."""
    seen = {}
    monkeypatch.setattr(LocalGroup, "agree", lambda self, name, value, *_: seen.update({name: value}))
    return seen


def test_yields_the_strategy_that_auto_means(agreed):
    given = TrainConfig(strategy="auto", output_dir="mine", intra_op_threads=3)
    with open_strategy.opened_strategy(given) as (config, detection, strategy):
        assert (config.strategy, detection.strategy, strategy.name) == ("single", "single", "single")
        assert open_strategy.hosts(strategy)
    assert agreed["flags"]["--strategy"] == "single"
    assert agreed["flags"]["--batch_size"] == 64
    assert not {"--output_dir", "--intra_op_threads"} & agreed["flags"].keys()
    assert "tensorflow" in agreed["versions"]


def test_the_strategy_gets_the_options_that_it_takes():
    with open_strategy.opened_strategy(TrainConfig(devices=2)) as (_, _, strategy):
        assert (strategy.name, strategy.replicas) == ("mirrored", 2)


def test_rules_between_flags_hold_for_the_chosen_strategy(monkeypatch):
    monkeypatch.setattr(open_strategy, "start", lambda *_: pytest.fail("the strategy was started"))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    with pytest.raises(InputError, match="--devices=2 --strategy=multiworker"):
        with open_strategy.opened_strategy(TrainConfig(devices=2)):
            pass


def test_what_a_class_of_the_user_s_declares_is_checked_before_it_starts(monkeypatch, tmp_path):
    (tmp_path / "declaring.py").write_text(
        "import tfdist\n"
        "from tfdist.config.strategy_declaration import Declaration, Processes, Refusal\n"
        "rule = Refusal('compression', 'none', 'This engine sums by itself: leave out --compression.')\n"
        "class Own(tfdist.Strategy):\n"
        "    declaration = Declaration(name='own', processes=Processes.ONE, options=(), refuses=(rule,))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(open_strategy, "start", lambda *_: pytest.fail("the strategy was started"))
    own = TrainConfig(strategy="declaring:Own", compression="fp16")
    with pytest.raises(
        InputError, match="leave out --compression. Received: --compression=fp16 --strategy=declaring:Own"
    ):
        with open_strategy.opened_strategy(own):
            pass
    environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    with pytest.raises(InputError, match="--strategy=declaring:Own is for one process"):
        open_strategy.choose(own, environment)


def test_the_coordinator_flag_is_the_environment_s(monkeypatch):
    environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    found = open_strategy.choose(TrainConfig(coordinator="elsewhere:3000"), environment)
    assert found.cluster.coordinator == "elsewhere:3000"


@pytest.mark.parametrize(("error", "waited"), [(Preempted, True), (NotFiniteError, False)])
def test_who_was_preempted_waits_for_the_others_as_who_is_done(monkeypatch, error, waited):
    """All ranks have agreed on a preemption; other errors may be unknown to the other ranks."""
    names = []
    monkeypatch.setattr(LocalGroup, "barrier", lambda self, name, deadline=60.0: names.append(name))
    with pytest.raises(error), open_strategy.opened_strategy(TrainConfig()):
        raise error("at step 3")
    assert ("end" in names) == waited


@pytest.mark.parametrize(("given", "deadline"), [({}, math.inf), ({"end_timeout_seconds": 600.0}, 600.0)])
def test_who_is_done_early_waits_as_long_as_the_others_live(monkeypatch, given, deadline):
    """They may be writing a large model; the group detects a lost process."""
    waits = {}
    monkeypatch.setattr(LocalGroup, "barrier", lambda self, name, deadline=60.0: waits.update({name: deadline}))
    with open_strategy.opened_strategy(TrainConfig(start_timeout_seconds=1.0), **given):
        pass
    assert waits["end"] == deadline


def test_a_flag_that_is_not_given_leaves_a_strategy_of_the_user_s_own_its_default(monkeypatch):
    class Own(Mirrored):
        def __init__(self, *, cluster, join, devices: int = 2, communication: str):
            raise NotImplementedError

    module = types.ModuleType("mine")
    module.Own = Own
    monkeypatch.setitem(sys.modules, "mine", module)
    config = TrainConfig(strategy="mine:Own")
    detection = open_strategy.choose(config)
    assert open_strategy._options(config, detection) == {"communication": "auto"}
    given = dataclasses.replace(config, devices=3)
    assert open_strategy._options(given, detection) == {"communication": "auto", "devices": 3}
