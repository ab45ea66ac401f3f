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
from tfdist import testing
from tfdist.checkpoint.format import Checkpoint
from tfdist.cli.comparison import Replay
from tfdist.cluster.environment import Cluster
from tfdist.coordination import LocalGroup
from tfdist.errors import InputError, NotFiniteError
from tfdist.gradients import Clip, LossScale
from tfdist.reporting import RunDirectory
from tfdist.trainer.options import Schedule

CASE = testing.Case(model="cnn", optimizer="sgd")
NUMBERS = ("value replicas", "value batch_schedule")


def launched(command, directory, workers=2, servers=2):
    """Returns the command that starts workers and servers of a command of Python."""
    flags = [f"--processes={workers}", f"--servers={servers}", f"--log_dir={directory}/logs"]
    return [sys.executable, "-m", "tfdist.launch", *flags, "--", sys.executable, *command]


TASKS = {
    "cnn": ["--model=cnn", "--dataset=digits", "--float64"],
    "compression": [
        "--model=cnn",
        "--dataset=digits",
        "--float64",
        "--compression=topk(ratio=0.05)",
        "--compression_min_bytes=1024",
    ],
    "a scaled loss": [
        "--model=cnn",
        "--dataset=digits",
        "--precision=mixed_float16",
        "--loss_scale=dynamic(initial_power=20,growth_interval=2)",
        "--tolerance=1e-9",
    ],
    "embeddings by rows": [
        "--float64",
        "--model=transformer(layers=1,width=16,heads=2)",
        "--dataset=text(length=16)",
        "--batch_size=16",
        "--min_table_bytes=1",
    ],
    "a row per key": [
        "--float64",
        "--model=tests.strategies.keyed_network:network",
        "--dataset=text(length=16)",
        "--batch_size=16",
    ],
}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("task", "staleness"),
    [
        pytest.param("cnn", "async(late=scale(0.1), pull_every=4)", marks=pytest.mark.smoke("parameter_server")),
        ("compression", "async"),
        *(pytest.param(task, "async", marks=pytest.mark.full) for task in ("a scaled loss", "embeddings by rows")),
        *(pytest.param("a row per key", each, marks=pytest.mark.full) for each in ("sync", "bounded(2)")),
        pytest.param("cnn", "async(late=reject(after=1, rows=dropped), pull_every=4)", marks=pytest.mark.full),
    ],
)
def test_a_run_of_two_workers_equals_that_of_one_device_or_its_updates_made_again(task, staleness, tmp_path):
    verify = ["-m", "tfdist.verify", "--strategy=parameter_server", f"--staleness={staleness}"]
    flags = [*TASKS[task], "--steps=20", "--clip_norm=0.5", "--optimizer=sgd(momentum=0.9)"]
    [output] = processes.finish(launched([*verify, *flags], tmp_path), environment=processes.ONE_THREAD, seconds=120)
    assert ("One device makes the same updates" in output) == (staleness != "sync")
    assert "Replicas are equal bit for bit" in output


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
    program = f"{change}\nimport runpy; runpy.run_module('tfdist.verify', run_name='__main__')"
    verify = ["-c", program, "--strategy=parameter_server", f"--staleness={staleness}", *SHARED, *more]
    [output] = processes.finish(
        launched(verify, tmp_path, workers=3), environment=processes.ONE_THREAD, code=code, seconds=120
    )
    assert "One device makes the same updates" in output and ("NOT EQUAL" in output) == bool(code)
    assert "up to 2 updates old" in output or "Dropped " in output


@pytest.mark.processes
@pytest.mark.full
def test_the_errors_of_both_workers_are_saved(tmp_path):
    flags = ["--strategy=parameter_server", "--staleness=async", *TASKS["compression"][:2], *TASKS["compression"][3:]]
    train = ["-m", "tfdist.train", *flags, "--steps=20", "--checkpoint_every=20", f"--output_dir={tmp_path}/run"]
    processes.finish(launched(train, tmp_path, servers=1), environment=processes.ONE_THREAD)
    checkpoint = Checkpoint.open(tmp_path / "run/checkpoints/step-000000020")
    first, second = checkpoint.read("replica_state/conv_0/kernel/error")
    assert np.any(first) and np.any(second) and np.any(first != second)


@pytest.mark.processes
def test_training_goes_on_when_a_worker_is_killed_and_counts_each_step_once(tmp_path):
    flags = ["--strategy=parameter_server", "--staleness=bounded(0)", "--model=tests.end_to_end.chaos.network:network"]
    more = ["--dataset=digits", "--steps=300", "--checkpoint_every=150", "--eval_every=150", "--optimizer=adamw"]
    train = ["-m", "tfdist.train", *flags, *more, "--batch_size=48"]
    served = [*train, f"--output_dir={tmp_path}/served"]
    with processes.job(launched(served, tmp_path, servers=1), 1, processes.ONE_THREAD) as job:
        begun = tmp_path / "served/ledger/start-0-rank-0.bin"
        wait_for(lambda: begun.exists() and begun.stat().st_size, 120)
        os.kill(child_of_rank(job.processes[0].pid, 1), signal.SIGKILL)
        [end] = job.wait(120)
    assert end.code == 0, end.output
    assert "Worker rank 1 is lost" in end.output and "continues with 1 of 2 workers" in end.output
    alone = [sys.executable, *train, "--servers=0", f"--output_dir={tmp_path}/alone"]
    processes.finish(alone, environment=processes.ONE_THREAD)
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
    task = ["--model=tests.end_to_end.chaos.network:network", "--dataset=digits", "--optimizer=sgd(momentum=0.9)"]
    train = ["-m", "tfdist.train", "--strategy=parameter_server", *task, "--checkpoint_every=20"]
    run, replay = f"{tmp_path}/run", f"--staleness=replay({tmp_path}/run/ledger)"
    for flags in (
        ["--staleness=async(late=scale(0.1), pull_every=3)", "--steps=40", f"--output_dir={run}"],
        [replay, "--steps=20", f"--output_dir={tmp_path}/again"],
        [replay, "--steps=40", f"--output_dir={tmp_path}/again"],
    ):
        processes.finish(launched([*train, *flags], tmp_path), environment=processes.ONE_THREAD)
    found, expected = (ending(tmp_path / name, 40) for name in ("again", "run"))
    assert found.tensors == expected.tensors and found.proof == expected.proof == ""
    assert [record["loss"] for record in found.records] == [record["loss"] for record in expected.records]
    assert RunDirectory(tmp_path / "again").read_updates() == RunDirectory(tmp_path / "run").read_updates()


def test_one_worker_gives_the_result_of_one_device_bit_for_bit(served, single, float64):
    expected = testing.run_case(single, CASE)
    found = testing.run_case(served(), CASE)
    assert all(found.variables[path].tobytes() == value.tobytes() for path, value in expected.variables.items())
    assert found.losses == expected.losses and found.evaluation == pytest.approx(expected.evaluation, rel=1e-12)


WRONG = {
    "one update twice": lambda updates: [*updates[:3], updates[2]._replace(version=3), *updates[4:]],
    "a version off by one": lambda updates: [*updates[:3], updates[3]._replace(versions=(2,)), *updates[4:]],
    "no factors": lambda updates: [update._replace(factor=1.0) for update in updates],
    "another worker": lambda updates: [*updates[:3], updates[3]._replace(workers=(1,)), *updates[4:]],
    "as recorded": list,
}
TOP_K = "topk(ratio=0.05)"
CODECS = {TOP_K: 6, "topk(ratio=0.1)|qsgd": 4, "fp16": 1.8, "signsgd": 8}  # with the least ratio of compression


def replayed(served, single, compression, change=list, methods=lambda methods: methods, staleness="async"):
    """Returns the largest difference between five asynchronous updates and their replay, and the bytes pushed per step."""
    strategy, options = served(staleness), {"compression_min_bytes": 1024}
    trainer = testing.make_trainer(strategy, CASE, compression=compression, **options)
    trainer.build(testing.source_of(CASE))
    strategy.remote.records_updates = True
    trainer.fit(testing.source_of(CASE), batch_size=CASE.batch_size, steps=5, verbose=0)
    synchronizer = trainer.program.synchronizer
    reference = testing.make_trainer(single, CASE)
    reference.build(testing.source_of(CASE))
    placement = strategy.remote.servers.placement
    replay = Replay(reference.model, single, change(synchronizer.updates), placement, methods(synchronizer.methods))
    reference.program.synchronizer = replay
    reference.fit(testing.source_of(CASE), batch_size=CASE.batch_size, steps=5, verbose=0)
    pairs = zip(trainer.model.trainable_variables, reference.model.trainable_variables, strict=True)
    return max(float(np.max(np.abs(a.numpy() - b.numpy()))) for a, b in pairs), synchronizer.payload_per_step


@pytest.mark.parametrize("name", WRONG)
def test_a_replay_of_other_updates_differs(name, served, single, float64):
    staleness = "async(late=scale(0.5), pull_every=2)" if name == "no factors" else "async"
    distance, _ = replayed(
        served, single, TOP_K if name == "another worker" else "none", WRONG[name], staleness=staleness
    )
    assert distance == 0 if name == "as recorded" else distance > 1e-4


@pytest.mark.parametrize("codec", [TOP_K, *(pytest.param(codec, marks=pytest.mark.full) for codec in [*CODECS][1:])])
def test_compressed_gradients_equal_those_of_one_device_and_are_smaller(codec, served, single, float64):
    (distance, payload), (_, whole) = (replayed(served, single, method) for method in (codec, "none"))
    assert distance == 0 and payload * CODECS[codec] < whole


def test_a_replay_without_error_feedback_differs(served, single, float64):
    def forget(methods):
        return [method.replace(TOP_K, "topk(ratio=0.05, feedback=False)") for method in methods]

    assert replayed(served, single, TOP_K, methods=forget)[0] > 1e-4


def test_what_callbacks_assign_reaches_the_servers(served, single, float64):
    def weights(strategy):
        halve = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
        clear = keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs: trainer.model.layers[-1].bias.assign(np.zeros([10]))
        )
        trainer = testing.make_trainer(strategy, dataclasses.replace(CASE, model="mlp"))
        trainer.fit(testing.source_of(CASE), batch_size=16, epochs=3, callbacks=[halve, clear], verbose=0)
        return [variable.numpy() for variable in (*trainer.model.variables, *trainer.model.optimizer.variables)]

    pairs = zip(weights(single), weights(served()), strict=True)
    assert all(a.tobytes() == b.tobytes() for a, b in pairs)


@pytest.mark.parametrize("staleness", ["async", pytest.param("sync", marks=pytest.mark.full)])
def test_a_resumed_run_has_the_errors_of_compressed_gradients(staleness, served, float64, tmp_path):
    def train(steps, **options):
        trainer = testing.make_trainer(served(staleness), CASE, compression=TOP_K, compression_min_bytes=1024)
        trainer.build(testing.source_of(CASE))
        if not options:
            trainer.resume(tmp_path)
        trainer.fit(testing.source_of(CASE), batch_size=CASE.batch_size, steps=steps, verbose=0, **options)
        errors = [value.values for name, value in trainer.state.items() if name.endswith("/error")]
        return [variable.numpy().tobytes() for variable in trainer.model.variables], errors

    train(3, checkpoints=tfdist.Checkpoints(directory=str(tmp_path), every=3))
    (found, errors), (expected, _) = train(6), train(6, checkpoints=None)
    assert found == expected and all(np.any(error) for error in errors)


@pytest.mark.parametrize(
    "staleness", ["bounded(0)", *(pytest.param(each, marks=pytest.mark.full) for each in ("sync", "async"))]
)
def test_a_scaled_loss_skips_the_steps_of_one_device_bit_for_bit(staleness, served, single, mixed_float16):
    def train(strategy):
        scale, records = LossScale(initial=2.0**22, growth_interval=2), []
        trainer = testing.make_trainer(strategy, CASE, loss_scale=scale, clip=Clip(norm=0.5))
        record = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda step, logs: records.append((step, trainer.loss_scale, logs["loss"]))
        )
        options = {"batch_size": CASE.batch_size, "callbacks": [record], "verbose": 0}
        history = trainer.fit(testing.source_of(CASE), steps=12, schedule=Schedule(steps_per_call=4), **options)
        variables = [*trainer.model.variables, *trainer.model.optimizer.variables]
        return [np.asarray(v.value).tobytes() for v in variables], records, history.history["accuracy"]

    expected = train(single)
    scales = [scale for _, scale, _ in expected[1]]
    assert (
        scales[0] < 2.0**30 and sorted(scales, reverse=True) != scales
    )  # steps are skipped, and the scale grows again
    assert repr(train(served(staleness))) == repr(expected)  # losses may be NaN


@pytest.mark.parametrize("staleness", ["bounded(0)", "sync"])
def test_the_limit_of_skipped_steps_ends_a_run(staleness, served, mixed_float16):
    scale = LossScale(initial=2.0**60, growth_interval=0, cap=2.0**60)
    trainer = testing.make_trainer(served(staleness), CASE, loss_scale=scale, max_skipped_steps=3)
    with pytest.raises(NotFiniteError, match="The last is step 2"):
        trainer.fit(testing.source_of(CASE), batch_size=CASE.batch_size, steps=12, verbose=0)
    assert trainer.model.optimizer.iterations == 0


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
    first, second = (testing.make_trainer(strategy, CASE) for _ in range(2))
    for trainer in (first, second, first):
        trainer.fit(testing.source_of(CASE), batch_size=16, steps=2, verbose=0)


def start_others(_):
    ParameterServer(cluster=Cluster(0, 3, servers=1), join=lambda _: LocalGroup(), servers=2)


REFUSED = {
    "servers unlike TF_CONFIG": (start_others, "Received: --servers=2, but 1 in TF_CONFIG. Leave out --servers"),
    "two models": (train_again, "hold one model at a time"),
    "a method that sums": (
        lambda strategy: small(strategy, compression="powersgd(rank=2)", compression_min_bytes=1),
        r"use fp16, bf16, .*Received: compression=powersgd\(rank=2\)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_servers_do_not_support_is_refused(name, served):
    use, message = REFUSED[name]
    with pytest.raises(InputError, match=message):
        use(served())
