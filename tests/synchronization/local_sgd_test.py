"""Local SGD and DiLoCo against steps that sum gradients, in float64; what depends on agreement; streaming_test.py has NumPy."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.selection import quick
from tests.synchronization.linear_regression import (
    BATCH,
    NESTEROV,
    RANDOM,
    X,
    Y,
    assert_close,
    fit,
    global_weights,
    of_replicas,
    trained,
    trainer_of,
)
from tfdist import keras_internals
from tfdist.errors import InputError, NotFiniteError
from tfdist.gradients import LossScale


@pytest.mark.parametrize("sync", ["local_sgd(period=1)", "post_local_sgd(warmup_steps=3, period=1)"])
def test_an_exchange_after_every_step_of_plain_sgd_equals_sums_of_gradients(sync, mirrored3):
    trainer, history = trained(mirrored3, sync)
    reference, of_reference = trained(mirrored3, "every_step")
    assert_close(global_weights(trainer), global_weights(reference))
    assert [r["loss"] for r in history.records] == pytest.approx([r["loss"] for r in of_reference.records], rel=1e-9)


@pytest.mark.parametrize("state", ["local", "averaged", "reset"])
def test_the_state_of_the_optimizer(state, mirrored3):
    with mirrored3.scope():
        adam = keras.optimizers.Adam(0.01)
    trained(mirrored3, f"local_sgd(period=4, state={state})", steps=4, optimizer=adam)
    moments = [of_replicas(mirrored3, v) for v in keras_internals.slots(adam)]
    assert len(moments) == 4
    differ = [any((first != other).any() for other in others) for first, *others in moments]
    assert differ == [state == "local"] * 4
    assert all((np.stack(copies) == 0).all() for copies in moments) == (state == "reset")
    assert [int(count) for count in of_replicas(mirrored3, adam.iterations)] == [4, 4, 4]


@pytest.mark.parametrize(
    "sync",
    [
        "local_sgd(period=2)",
        "diloco(period=2)",
        "easgd(period=2)",
        "hierarchical_local_sgd(periods=(2, 8), group_sizes=(2,))",
        "local_sgd(period=2, delay=2)",
        "diloco(period=2, delay=2, mixing=0.5)",
        "fedavg(clients=6, fraction=1.0, outer='sgd(learning_rate=0.7)')",
    ],
)
def test_constraints_of_weights_hold_after_an_exchange(sync, float64):
    replicas = 4 if sync.startswith("hierarchical") else 3
    strategy = tfdist.load_strategy("mirrored", devices=replicas)
    layers = [lambda: keras.layers.Dense(4, kernel_constraint=keras.constraints.UnitNorm(), name="unit")]
    trainer, _ = trained(strategy, sync, steps=4 if "delay" in sync else 2, layers=layers)
    kernel = trainer.model.trainable_variables[0]
    for copy in of_replicas(strategy, kernel):
        np.testing.assert_allclose(np.linalg.norm(copy, axis=0), 1, rtol=1e-6)


class Rprop(keras.optimizers.Optimizer):
    """Steps that begin at 0.1 and grow: a user's optimizer whose state does not begin at zero."""

    def build(self, variables):
        """Creates a step for each element."""
        super().build(variables)
        begin = keras.initializers.Constant(0.1)
        self._steps = [self.add_variable_from_reference(v, "step", initializer=begin) for v in variables]

    def update_step(self, gradient, variable, learning_rate):
        """Makes steps of the size of the state."""
        step = self._steps[self._get_variable_index(variable)]
        self.assign_sub(variable, learning_rate * step * keras.ops.sign(gradient))
        self.assign(step, 1.2 * step)


def test_a_reset_restores_initial_values_other_than_zero(mirrored3):
    with mirrored3.scope():
        rprop = Rprop(0.01)
    trained(mirrored3, "local_sgd(period=4, state=reset)", steps=4, optimizer=rprop)
    for slot in keras_internals.slots(rprop):
        assert np.stack(of_replicas(mirrored3, slot)) == pytest.approx(0.1, rel=1e-6)
    with pytest.raises(InputError, match="must begin at constants. Received: Rprop, .*has already been updated"):
        trained(mirrored3, "local_sgd(period=4, state=reset)", steps=4, optimizer=rprop)


@pytest.mark.parametrize("sync", ["local_sgd(period=4, state=reset)", "fedavg(clients=3)"])
def test_state_that_begins_as_a_copy_of_the_weights_cannot_be_reset(sync, mirrored3):
    with pytest.raises(InputError, match="at constants. Received: ScheduleFreeAdamW, .* Use a new optimizer"):
        trained(mirrored3, sync, steps=1, optimizer="schedulefreeadamw")


@pytest.mark.parametrize("sync", ["diloco", "fedavg"])
def test_an_outer_optimizer_whose_state_begins_as_a_copy_of_the_weights_is_refused(sync, mirrored3):
    with pytest.raises(InputError, match="so it must initialize its state to constants. Received: outer=sch"):
        trained(mirrored3, f"{sync}(outer='schedulefreeadamw(learning_rate=0.1)')", steps=1)


class OverflowsOn2(keras.layers.Layer):
    """Overflows on replica 2."""

    def call(self, x, training=False):
        """Returns infinities on replica 2 in training."""
        context = tf.distribute.get_replica_context()
        rank = context.replica_id_in_sync_group if context and training else 0
        return tf.where(tf.equal(rank, 2), x * 1e200 * 1e200, x)


def test_a_replica_that_overflows_skips_alone_and_enters_the_exchange(mirrored3, caplog):
    scale = LossScale(initial=2.0**10)
    trainer = trainer_of(mirrored3, "local_sgd(period=2)", layers=[OverflowsOn2], loss_scale=scale)
    history = fit(trainer, 4)
    assert "replica 2 skipped 2 of the 2 steps from step 0 on" in caplog.text
    assert np.isfinite(history.records[-1]["loss"])
    kernel, _ = trainer.model.trainable_variables
    first, *others = of_replicas(mirrored3, kernel)
    assert np.isfinite(first).all() and all((first == other).all() for other in others)
    assert trainer.state["loss_scale/scale"].values.tolist() == [1024.0, 1024.0, 64.0]
    assert trainer.loss_scale == 64.0


def test_another_number_of_replicas_takes_over_loss_scales(mirrored3, mirrored2, float64, tmp_path):
    def resumed(strategy, path):
        trainer = trainer_of(strategy, "local_sgd(period=4)", loss_scale=LossScale(initial=2.0**10))
        trainer.build((X, Y))
        trainer.resume(path)
        return trainer.state["loss_scale/scale"].values.tolist()

    for strategy, name in ((mirrored3, "three"), (mirrored2, "two")):
        trainer = trainer_of(strategy, "local_sgd(period=4)", loss_scale=LossScale(initial=2.0**10))
        checkpoints = tfdist.Checkpoints(directory=str(tmp_path / name), every=2)
        fit(trainer, 2, checkpoints=checkpoints)
    assert resumed(mirrored2, tmp_path / "three") == [1024.0] * 2
    assert resumed(mirrored3, tmp_path / "two") == [1024.0] * 3


@pytest.mark.parametrize(
    ("sync", "other"),
    [
        ("local_sgd(period=4)", f"diloco(period=4, outer='{NESTEROV}')"),
        ("easgd(period=2)", "local_sgd(period=2)"),  # whose replicas have weights of their own at step 2, too
        ("diloco(period=4, overlap=True)", "diloco(period=4)"),
        ("diloco(period=4)", "diloco(period=4, overlap=True)"),
        ("post_local_sgd(warmup_steps=1)", "post_local_sgd(warmup_steps=9)"),
        ("diloco(period=4)", "post_local_sgd(warmup_steps=9, overlap=True)"),
    ],
)
def test_a_checkpoint_of_another_way_of_exchanging_is_refused(sync, other, mirrored3, tmp_path):
    trainer = trainer_of(mirrored3, sync)
    checkpoints = tfdist.Checkpoints(directory=str(tmp_path), every=2)
    fit(trainer, 2, checkpoints=checkpoints)
    resuming = trainer_of(mirrored3, other)
    resuming.build((X, Y))
    with pytest.raises(InputError, match="the `sync` method with which it was saved"):
        resuming.resume(tmp_path)


@pytest.mark.parametrize("other", ["local_sgd(period=3)", "easgd(period=3)"])
def test_a_run_may_resume_with_another_period_or_a_center(other, mirrored3, tmp_path):
    trainer = trainer_of(mirrored3, "local_sgd(period=2)")
    checkpoints = tfdist.Checkpoints(directory=str(tmp_path), every=3)
    fit(trainer, 3, checkpoints=checkpoints)
    resuming = trainer_of(mirrored3, other)
    resuming.build((X, Y))
    assert resuming.resume(tmp_path) == 3
    fit(resuming, 3)
    for copy in resuming.program.synchronizer.variables:  # the global weights
        first, *others = of_replicas(mirrored3, copy)
        assert all((first == one).all() for one in others)


def test_a_loss_that_is_not_finite_ends_the_run_at_its_step(mirrored3):
    data = X.copy()
    trainer = trainer_of(mirrored3, "local_sgd(period=5)")
    data[17] = np.nan
    with pytest.raises(NotFiniteError, match="at step"):
        trainer.fit(data, Y, batch_size=BATCH, steps=4, verbose=0, shuffle=False)
    assert trainer.step == 1  # of step 1, rows 10 to 19 contain the bad one


@pytest.mark.parametrize(
    "compression", quick(["bf16", "int8", "topk(ratio=0.2)", "powersgd(rank=1)"], "topk(ratio=0.2)", "powersgd(rank=1)")
)
def test_changes_are_compressed_with_error_feedback(compression, mirrored3):
    exact, _ = trained(mirrored3, "local_sgd(period=3)", steps=12)
    lossy, history = trained(
        mirrored3, "local_sgd(period=3)", steps=12, compression=compression, compression_min_bytes=0
    )
    [first, _], [other, _] = global_weights(lossy), global_weights(exact)
    assert 0 < np.linalg.norm(first - other) < 0.5 * np.linalg.norm(other)
    kernel, _ = lossy.model.trainable_variables
    copies = of_replicas(mirrored3, kernel)
    assert all((copies[0] == copy).all() for copy in copies)
    assert [name for name in lossy.state if name.endswith("/error")] or compression in ("bf16", "int8")


def test_micro_steps_and_masks(mirrored3):
    def found(sync, steps, sample_weight=None, **options):
        trainer = trainer_of(mirrored3, sync, **options)
        fit(trainer, steps, 12, sample_weight=sample_weight)
        return global_weights(trainer)

    for options in ({"accumulate_steps": 2}, {}):
        assert_close(found("local_sgd(period=1)", 4, **options), found("every_step", 4, **options))
    weight = RANDOM.uniform(0.5, 1.5, 40)
    parts = found("local_sgd(period=3)", 6, weight, accumulate_steps=2)
    assert_close(parts, found("local_sgd(period=3)", 6, weight))


def test_a_moving_average_of_the_weights_is_averaged_too(mirrored3):
    trainer, _ = trained(mirrored3, "local_sgd(period=4)", steps=6, ema=0.9)
    averages = [a for _, a in keras_internals.weight_averages(trainer.model.optimizer)]
    found = global_weights(trainer)
    wanted = [np.average(of_replicas(mirrored3, average), axis=0, weights=[4, 3, 3]) for average in averages]
    assert_close(found, wanted)


def test_weights_changed_by_the_program_are_taken_over(mirrored3):
    trainer, _ = trained(mirrored3, "local_sgd(period=2)", steps=2)
    trainer.model.set_weights([np.zeros((5, 2)), np.zeros(2)])
    fit(trainer, 2)
    fresh = trainer_of(mirrored3, "local_sgd(period=2)")
    fresh.build((X, Y))
    fresh.model.set_weights([np.zeros((5, 2)), np.zeros(2)])
    fit(fresh, 2)
    assert np.linalg.norm(global_weights(trainer)[0]) < 3 * np.linalg.norm(global_weights(fresh)[0])
