"""The clock of a schedule's actions: each reading follows what it measures, and without a clock nothing is added."""

import time

import tensorflow as tf

from tfdist.collectives import OneReplica
from tfdist.pipelining.execution import NO_CLOCK, ActionClock, Execution
from tfdist.pipelining.passes import Forward
from tfdist.pipelining.schedule_catalog import make_schedule

SIZE = 600  # of matrices whose product takes some milliseconds


class SlowStage:
    """A stage whose passes take long, without any stateful operation, which functions would keep in order by themselves."""

    received = sent = ()

    def __init__(self):
        self.variables = [tf.Variable(1e-3)]

    def arguments(self, micro_batch):
        return [tf.constant(float(micro_batch))]

    def forward(self, arguments, received):
        x = tf.fill([SIZE, SIZE], self.variables[0] + 0.0 * arguments[0])
        total = tf.reduce_sum(x @ x @ x @ x)
        return Forward([], total, total)

    def gradients(self, found):
        return found


def run(clock):
    stage = SlowStage()
    schedule = make_schedule("gpipe", 1, 3)

    def step():
        [total] = Execution(schedule, 0, {0: stage}, OneReplica(), clock).run().gradients[0]
        return total, () if clock is NO_CLOCK else clock.read()

    return tf.function(step, autograph=False).get_concrete_function()


def test_actions_are_measured_in_their_order():
    step = run(ActionClock())
    step()

    def measured():
        """Returns the part of a step in which actions were measured."""
        began = time.time()
        _, times = step()
        ended = time.time()
        spans = times.numpy().tolist()
        assert len(spans) == 6
        flat = [moment for span in spans for moment in span]
        assert flat == sorted(flat) and began <= flat[0] and flat[-1] <= ended
        return sum(end - start for start, end in spans) / (ended - began)

    assert any(measured() > 0.5 for _ in range(10))  # on a loaded machine, a step may pause between two actions


def test_a_clock_changes_no_result():
    assert float(run(ActionClock())()[0]) == float(run(NO_CLOCK)()[0])


def test_nothing_is_added_without_a_clock():
    step = run(NO_CLOCK)
    assert not [operation for operation in step.graph.get_operations() if operation.type == "Timestamp"]
