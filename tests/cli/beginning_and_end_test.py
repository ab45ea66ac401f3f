"""Opening a strategy for a command, and what is said at the end of a run."""

import dataclasses
import json
import math
import sys
import time
import types

import pytest
from tfdist.strategies.mirrored import Mirrored

from tfdist.checkpoint.manager import Checkpoints
from tfdist.cli import open_strategy
from tfdist.cli.early_checks import detect_context
from tfdist.cli.run import Run, summary
from tfdist.config.train_config import TrainConfig
from tfdist.coordination import LocalGroup
from tfdist.errors import InputError, NotFiniteError, Preempted
from tfdist.reporting import RunDirectory
from tfdist.trainer.options import Reporting

RANK_0_OF_2 = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}


@pytest.fixture
def agreed(monkeypatch):
    """The values that the processes have compared, by name."""
    seen = {}
    monkeypatch.setattr(LocalGroup, "agree", lambda self, name, value, *_, **options: seen.update({name: value}))
    return seen


def test_yields_the_strategy_that_auto_means(agreed):
    given = TrainConfig(strategy="auto", output_dir="mine", intra_op_threads=3)
    with open_strategy.running_strategy(given) as (config, strategy_choice, strategy):
        assert (config.strategy, strategy_choice.strategy, strategy.name) == ("single", "single", "single")
        assert open_strategy.host_names(strategy)
    assert agreed["flags"]["--strategy"] == "single"
    assert agreed["flags"]["--batch_size"] == 64
    assert not {"--output_dir", "--intra_op_threads"} & agreed["flags"].keys()
    assert "tensorflow" in agreed["versions"]


def test_rules_between_flags_hold_for_the_chosen_strategy(monkeypatch):
    monkeypatch.setattr(open_strategy, "start", lambda *_: pytest.fail("the strategy was started"))
    for name, value in RANK_0_OF_2.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match="--devices=2 --strategy=multiworker"):
        with open_strategy.running_strategy(TrainConfig(devices=2)):
            pass


def test_what_a_class_of_the_user_s_declares_is_checked_before_it_starts(monkeypatch, tmp_path):
    (tmp_path / "declaring.py").write_text(
        "import tfdist\n"
        "from tfdist.config.strategy_registry import Declaration, Processes\n"
        "rules = {'compression': 'This engine sums by itself: leave out --compression.'}\n"
        "class Own(tfdist.Strategy):\n"
        "    declaration = Declaration(name='own', processes=Processes.ONE, options=(), refuses=rules)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(open_strategy, "start", lambda *_: pytest.fail("the strategy was started"))
    own = TrainConfig(strategy="declaring:Own", compression="fp16")
    with pytest.raises(
        InputError, match="leave out --compression. Received: --compression=fp16 --strategy=declaring:Own"
    ):
        with open_strategy.running_strategy(own):
            pass
    with pytest.raises(InputError, match="--strategy=declaring:Own is for a single process"):
        open_strategy.choose(own, detect_context(own, RANK_0_OF_2))


def test_the_coordinator_flag_is_the_environment_s():
    found = detect_context(TrainConfig(coordinator="elsewhere:3000"), RANK_0_OF_2)
    assert found.cluster.coordinator == "elsewhere:3000"


@pytest.mark.parametrize(("error", "waited"), [(Preempted, True), (NotFiniteError, False)])
def test_who_was_preempted_waits_for_the_others_as_who_is_done(monkeypatch, error, waited):
    """All ranks have agreed on a preemption; other errors may be unknown to the other ranks."""
    names = []
    monkeypatch.setattr(LocalGroup, "barrier", lambda self, name, deadline=60.0: names.append(name))
    with pytest.raises(error), open_strategy.running_strategy(TrainConfig()):
        raise error("at step 3")
    assert ("end" in names) == waited


@pytest.mark.parametrize(("given", "deadline"), [({}, math.inf), ({"end_timeout_seconds": 600.0}, 600.0)])
def test_who_is_done_early_waits_as_long_as_the_others_live(monkeypatch, given, deadline):
    """They may be writing a large model; the group detects a lost process."""
    waits = {}
    monkeypatch.setattr(LocalGroup, "barrier", lambda self, name, deadline=60.0: waits.update({name: deadline}))
    with open_strategy.running_strategy(TrainConfig(start_timeout_seconds=1.0), **given):
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
    strategy_choice = open_strategy.choose(config, detect_context(config))
    assert open_strategy._options(config, strategy_choice) == {"communication": "auto"}
    given = dataclasses.replace(config, devices=3)
    assert open_strategy._options(given, strategy_choice) == {"communication": "auto", "devices": 3}


RECORDS = [
    {"kind": "train", "step": 5, "loss": 0.9, "accuracy": 0.5},
    {"kind": "eval", "step": 10, "loss": 0.5, "accuracy": 0.9, "recall": 0.1},
    {"kind": "eval", "step": 20, "loss": 0.4, "accuracy": 0.8, "recall": 0.2},
]


def run(path, seconds, monkeypatch, every="100"):
    """A run that has taken some seconds."""
    monkeypatch.setattr(time, "monotonic", lambda: seconds)
    checkpoints = Checkpoints(directory=str(path), every=every)
    return Run(RunDirectory(path), is_chief=True, checkpoints=checkpoints, reporting=Reporting(), start_time=0.0)


def test_the_end_has_the_result_the_best_value_what_is_next_and_the_directory_last(tmp_path, monkeypatch):
    assert summary(run(tmp_path / "a run", 83.2, monkeypatch), RECORDS, None, "--checkpoint=best") == [
        "eval after 20 steps: loss 0.4000  accuracy 0.8000",
        "best accuracy 0.9000 at step 10; trained to step 20 in 1 min 23 s",
        f"next: tfdist evaluate '{tmp_path}/a run' --checkpoint=best, or tfdist predict, or tfdist export",
        "or train longer: the same command with more --epochs or --steps",
        "model.keras, curves.png, metrics.jsonl and logs are in",
        f"{tmp_path}/a run",
    ]


@pytest.mark.parametrize(
    ("named", "said"),
    [({"strategy": "mirrored", "devices": 2, "augment": "a:b"}, False), ({"dataset": "tfds:a"}, True)],
)
def test_the_next_command_has_what_the_flags_of_the_run_need(named, said, tmp_path, monkeypatch, capsys):
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in RECORDS))
    run(tmp_path, 1.0, monkeypatch).print_summary(None, TrainConfig(**named))
    assert ("--safe_mode=false" in capsys.readouterr().out) == said


@pytest.mark.parametrize(
    ("records", "line"),
    [
        (
            [{"kind": "eval", "step": 3, "loss": 1.0}, {"kind": "eval", "step": 6, "loss": 2.0}],
            "best loss 1.0000 at step 3; ",
        ),
        (RECORDS[:2], ""),
        (RECORDS[:1], ""),
        ([{"kind": "eval", "step": 3, "loss": "nan"}, {"kind": "eval", "step": 6, "loss": "nan"}], ""),
    ],
)
def test_the_best_of_one_evaluation_or_of_none_is_not_mentioned(records, line, tmp_path, monkeypatch):
    found = summary(run(tmp_path, 4.25, monkeypatch, every="0"), records, None)
    assert found[1] == f"{line}trained to step {records[-1]['step']} in 4.2 s"
    assert found[2].endswith("or tfdist export") and len(found) == 5
