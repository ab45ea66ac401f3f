"""Training on parameter servers: in processes by the command that users type, and with a server in this process."""

import contextlib
import dataclasses
import json
import operator
import os
import signal
import sys

import keras
import numpy as np
import pytest
from tfdist.strategies.parameter_server import ParameterServer

import tfdist
from tests import processes
from tests.end_to_end.chaos.ending import differences, ending
from tests.end_to_end.chaos.striking import child_of_rank
from tests.waiting import wait_for
from tfdist.cluster.environment import Cluster
from tfdist.coordination import LocalGroup
from tfdist.errors import InputError
from tfdist.gradients import LossScale
from tfdist.reporting import RunDirectory
from tfdist.testing import parity
from tfdist.testing.comparison import Replay

CASE = parity.Case(model="cnn", optimizer="sgd")
NUMBERS = ("value replicas", "value batch_schedule")


@pytest.fixture
def served():
    """Returns a function that starts the strategy with a server in this process."""
    started = []

    def start(staleness="async"):
        started.append(ParameterServer(cluster=Cluster(), join=lambda _: LocalGroup(), servers=0, staleness=staleness))
        return started[-1]

    yield start
    for strategy in started:
        strategy.close()


TASKS = {
    "cnn": ["--model=cnn", "--dataset=digits"],
    "embeddings by rows": [
        "--model=transformer(layers=1,width=16,heads=2)",
        "--dataset=text(length=16)",
        "--batch_size=16",
        "--min_table_bytes=1",
    ],
}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("task", "staleness"),
    [
        pytest.param("cnn", "async(late=scale(0.1), pull_every=4)", marks=pytest.mark.smoke("parameter_server")),
        pytest.param("embeddings by rows", "async", marks=pytest.mark.full),
        pytest.param("cnn", "async(late=reject(after=1, rows=dropped), pull_every=4)", marks=pytest.mark.full),
    ],
)
def test_an_asynchronous_run_of_two_workers_equals_its_updates_made_again(task, staleness, tmp_path):
    launch = [sys.executable, "-m", "tfdist.launch", "--processes=2", "--servers=2", f"--log_dir={tmp_path}", "--"]
    verify = [sys.executable, "-m", "tfdist.verify", "--strategy=parameter_server", f"--staleness={staleness}"]
    flags = [*TASKS[task], "--steps=20", "--float64", "--clip_norm=0.5", "--optimizer=sgd(momentum=0.9)"]
    with processes.job([*launch, *verify, *flags], 1, processes.ONE_THREAD) as job:
        [end] = job.wait(120)
    assert end.code == 0, end.output
    assert "One device makes the same updates" in end.output and "Replicas are equal bit for bit" in end.output


SCHEDULERS = {
    "Slurm": "SLURM_JOB_ID={port} SLURM_STEP_ID=0 SLURM_PROCID={rank} SLURM_NTASKS=3 SLURM_LOCALID={rank}"
    " SLURM_STEP_TASKS_PER_NODE=3 SLURM_STEP_NODELIST=localhost TFDIST_COORDINATOR=localhost:{port}",
    "an indexed Job": "JOB_COMPLETION_INDEX={rank} TFDIST_PROCESSES=3 TFDIST_COORDINATOR=localhost:{port}",
}


@pytest.mark.processes
@pytest.mark.full
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_the_last_task_of_a_scheduler_is_the_server(scheduler, tmp_path):
    [address] = processes.free_addresses(1)
    flags = ["--strategy=parameter_server", "--servers=1", "--shard_variables=hash", "--model=mlp", "--steps=4"]
    train = [sys.executable, "-m", "tfdist.train", *flags, f"--output_dir={tmp_path}/run"]
    with contextlib.ExitStack() as stack:
        tasks = []
        for rank in range(3):
            text = SCHEDULERS[scheduler].format(rank=rank, port=address.rpartition(":")[2])
            variables = dict(variable.split("=") for variable in text.split())
            tasks.append(stack.enter_context(processes.job(train, 1, {**processes.ONE_THREAD, **variables})))
        ends = [end for task in tasks for end in task.wait(240)]
    assert [end.code for end in ends] == [0, 0, 0], "".join(end.output for end in ends)
    assert "on 1 server by hash; staleness sync" in ends[0].output and "rank 0 of 3" in ends[0].output
    assert (tmp_path / "run/model.keras").exists()


WRONG_SCALE = "from tfdist.synchronization.server_updates import TicketLoop; TicketLoop._rows = lambda *_: (1, 4)"
SHARED = ["--model=mlp", "--dataset=digits", "--steps=20", "--float64", "--optimizer=sgd(momentum=0.9)"]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("staleness", "more", "change", "code"),
    [
        ("ssp(2)", ["--clip_norm=0.5"], "", 0),
        pytest.param("backup(workers=1)", ["--model=cnn"], "", 0, marks=pytest.mark.full),
        pytest.param("backup(workers=1)", [], WRONG_SCALE, 1, marks=pytest.mark.full),
    ],
)
def test_updates_from_shares_of_three_workers_equal_those_made_again(staleness, more, change, code, tmp_path):
    launch = [sys.executable, "-m", "tfdist.launch", "--processes=3", "--servers=2", f"--log_dir={tmp_path}", "--"]
    program = f"{change}\nimport runpy; runpy.run_module('tfdist.verify', run_name='__main__')"
    verify = [sys.executable, "-c", program, "--strategy=parameter_server", f"--staleness={staleness}"]
    with processes.job([*launch, *verify, *SHARED, *more], 1, processes.ONE_THREAD) as job:
        [end] = job.wait(120)
    assert end.code == code, end.output
    assert "One device makes the same updates" in end.output and ("NOT EQUAL" in end.output) == bool(code)
    assert "up to 2 updates old" in end.output or "rows were dropped" in end.output


@pytest.mark.processes
def test_training_goes_on_when_a_worker_is_killed_and_counts_each_step_once(tmp_path):
    flags = ["--strategy=parameter_server", "--staleness=bounded(0)", "--model=tests.end_to_end.chaos.network:network"]
    more = ["--dataset=digits", "--steps=300", "--checkpoint_every=150", "--eval_every=150", "--optimizer=adamw"]
    train = [sys.executable, "-m", "tfdist.train", *flags, *more, "--batch_size=48"]
    launch = [sys.executable, "-m", "tfdist.launch", "--processes=2", "--servers=1", f"--log_dir={tmp_path}/logs", "--"]
    served = [*launch, *train, f"--output_dir={tmp_path}/served"]
    with processes.job(served, 1, processes.ONE_THREAD) as job:
        begun = tmp_path / "served/ledger/start-0-rank-0.bin"
        wait_for(lambda: begun.exists() and begun.stat().st_size, 120)
        os.kill(child_of_rank(job.processes[0].pid, 1), signal.SIGKILL)
        [end] = job.wait(120)
    assert end.code == 0, end.output
    assert "Worker rank 1 is lost" in end.output and "continues with 1 of 2 workers" in end.output
    processes.finish([*train, "--servers=0", f"--output_dir={tmp_path}/alone"], environment=processes.ONE_THREAD)
    records = [json.loads(text) for text in (tmp_path / "served/metrics.jsonl").read_text().splitlines()]
    records = [record for record in records if record["kind"] == "train"]
    updates = [[worker["updates"] for worker in record["workers"]] for record in records]
    assert sum(map(sum, updates)) == 300 and sum(map(operator.itemgetter(1), updates)) > 0
    assert sum(record["staleness_histogram"][0]["0"] for record in records) == 300
    assert all(record["servers"][0]["pulled_bytes"] > 0 for record in records)
    found, expected = (ending(tmp_path / name, 300) for name in ("served", "alone"))
    # Bit for bit, and each example once in each epoch; what has a value for each replica differs in their number.
    assert {text.partition("/")[0] for text in differences(found, expected)} <= {"tensor statistics", *NUMBERS}


@pytest.mark.processes
@pytest.mark.full
def test_a_replay_that_is_resumed_ends_as_the_recorded_run(tmp_path):
    launch = [sys.executable, "-m", "tfdist.launch", "--processes=2", "--servers=2", f"--log_dir={tmp_path}/logs", "--"]
    task = ["--model=tests.end_to_end.chaos.network:network", "--dataset=digits", "--optimizer=sgd(momentum=0.9)"]
    train = [
        *launch,
        sys.executable,
        "-m",
        "tfdist.train",
        "--strategy=parameter_server",
        *task,
        "--checkpoint_every=20",
    ]
    run, replay = f"{tmp_path}/run", f"--staleness=replay({tmp_path}/run/ledger)"
    for flags in (
        ["--staleness=async(late=scale(0.1), pull_every=3)", "--steps=40", f"--output_dir={run}"],
        [replay, "--steps=20", f"--output_dir={tmp_path}/again"],
        [replay, "--steps=40", f"--output_dir={tmp_path}/again"],
    ):
        processes.finish([*train, *flags], environment=processes.ONE_THREAD)
    found, expected = (ending(tmp_path / name, 40) for name in ("again", "run"))
    assert found.tensors == expected.tensors and found.proof == expected.proof == ""
    assert [record["loss"] for record in found.records] == [record["loss"] for record in expected.records]
    assert RunDirectory(tmp_path / "again").read_updates() == RunDirectory(tmp_path / "run").read_updates()


def test_one_worker_gives_the_result_of_one_device_bit_for_bit(served, single, float64):
    expected = parity.run_case(single, CASE)
    found = parity.run_case(served(), CASE)
    assert all(found.variables[path].tobytes() == value.tobytes() for path, value in expected.variables.items())
    assert found.losses == expected.losses and found.evaluation == pytest.approx(expected.evaluation, rel=1e-12)


WRONG = {
    "one update twice": lambda updates: [*updates[:3], updates[2]._replace(version=3), *updates[4:]],
    "a version off by one": lambda updates: [*updates[:3], updates[3]._replace(versions=(2,)), *updates[4:]],
    "no factors": lambda updates: [update._replace(factor=1.0) for update in updates],
    "as recorded": list,
}


@pytest.mark.parametrize("name", WRONG)
def test_a_replay_of_other_updates_differs(name, served, single, float64):
    strategy = served("async(late=scale(0.5), pull_every=2)" if name != "a version off by one" else "async")
    trainer = parity.make_trainer(strategy, CASE)
    trainer.build(parity.source_of(CASE))
    strategy.remote.records_updates = True
    trainer.fit(parity.source_of(CASE), batch_size=CASE.batch_size, steps=5, verbose=0)
    updates = trainer.program.synchronizer.updates
    reference = parity.make_trainer(single, CASE)
    program = reference.build(parity.source_of(CASE))
    replay = Replay(reference.model, single, WRONG[name](updates), strategy.remote.servers.placement)
    reference._program = program._replace(synchronizer=replay)
    reference.fit(parity.source_of(CASE), batch_size=CASE.batch_size, steps=5, verbose=0)
    pairs = zip(trainer.model.trainable_variables, reference.model.trainable_variables, strict=True)
    distance = max(float(np.max(np.abs(a.numpy() - b.numpy()))) for a, b in pairs)
    assert distance == 0 if name == "as recorded" else distance > 1e-4


def test_what_callbacks_assign_reaches_the_servers(served, single, float64):
    def weights(strategy):
        halve = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
        clear = keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs: trainer.model.layers[-1].bias.assign(np.zeros([10]))
        )
        trainer = parity.make_trainer(strategy, dataclasses.replace(CASE, model="mlp"))
        trainer.fit(parity.source_of(CASE), batch_size=16, epochs=3, callbacks=[halve, clear], verbose=0)
        return [variable.numpy() for variable in (*trainer.model.variables, *trainer.model.optimizer.variables)]

    pairs = zip(weights(single), weights(served()), strict=True)
    assert all(a.tobytes() == b.tobytes() for a, b in pairs)


def small(strategy, **options):
    """Returns a trainer of one layer that has trained two steps."""
    with strategy.scope():
        model = keras.Sequential([keras.Input([4]), keras.layers.Dense(2)])
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        trainer = tfdist.Trainer(model, optimizer=optimizer, loss="mse", **options)
    trainer.fit(np.ones([8, 4]), np.ones([8, 2]), batch_size=4, steps=2, verbose=0)
    return trainer


def test_a_worker_has_no_slots_and_saves_those_of_the_servers(served, tmp_path):
    trainer = small(served())
    assert [type(v.value).__name__ for v in trainer.model.optimizer.variables[2:]] == ["RemoteVariable"] * 2
    trainer.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for variable, saved in zip(trainer.model.optimizer.variables, loaded.optimizer.variables, strict=True):
        np.testing.assert_array_equal(np.asarray(variable.value), saved.numpy())
        assert np.any(saved.numpy() != 0)


def train_again(strategy):
    first, second = (parity.make_trainer(strategy, CASE) for _ in range(2))
    for trainer in (first, second, first):
        trainer.fit(parity.source_of(CASE), batch_size=16, steps=2, verbose=0)


def start_others(_):
    ParameterServer(cluster=Cluster(0, 3, servers=1), join=lambda _: LocalGroup(), servers=2)


REFUSED = {
    "servers unlike TF_CONFIG": (start_others, "Received: --servers=2 and 1. Leave it out"),
    "two models": (train_again, "hold one model at a time"),
    "a loss scale": (
        lambda strategy: small(strategy, loss_scale=LossScale()),
        "need no loss scaling. Received: a loss scale",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_servers_do_not_support_is_refused(name, served):
    use, message = REFUSED[name]
    with pytest.raises(InputError, match=message):
        use(served())
