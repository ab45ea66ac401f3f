"""Plans match the actual bytes of arrays; tests/strategies/mesh_collectives_test.py compares the communication."""

import collections
import pathlib
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.experimental import dtensor
from tensorflow.tsl.profiler.protobuf import xplane_pb2

import tfdist
from tfdist import keras_internals
from tfdist.config.layouts import Shard, parse_layout
from tfdist.config.mesh import parse_mesh
from tfdist.errors import InputError
from tfdist.pipelining.schedule_catalog import make_schedule
from tfdist.planning import layout_plan
from tfdist.planning.pipeline_plan import idle_and_makespan

RANDOM = np.random.default_rng(0)
KINDS = ("CollectiveReduceV2", "CollectiveGatherV2", "CollectiveAllToAllV2")
TOKENS, NEXT = (RANDOM.integers(0, 32, (16, 8)).astype("int32") for _ in range(2))


def transformer(**arguments):
    return tfdist.models.transformer(input_shape=(8,), classes=32, layers=2, width=16, heads=4, **arguments)


def planned(shape, layout="", stage="none", optimizer="adam", axis="data", batch_size=8, **arguments):
    return plan_of(abstract_model(optimizer, **arguments), shape, layout, Shard(stage, axis, 16), batch_size)


def plan_of(model, shape, layout, shard=None, batch_size=8):
    mesh = parse_mesh(shape)
    return model.plan(mesh, parse_layout(layout, mesh), shard or Shard(axis="data"), batch_size)


def abstract_model(optimizer="adam", **arguments):
    return layout_plan.AbstractModel(lambda: (transformer(**arguments), keras.optimizers.get(optimizer)))


def trainer_of(shape, layout="", stage="none", optimizer="adam", **arguments):
    strategy = tfdist.load_strategy(
        "mesh", mesh_shape=shape, layout=layout, shard=stage, shard_min_elements=16, environment={}
    )
    with strategy.scope():
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        return tfdist.Trainer(transformer(**arguments), optimizer=optimizer, loss=loss)


def bytes_per_device(variables):
    parts = [dtensor.unpack(tf.convert_to_tensor(keras_internals.value_of(v)))[0] for v in variables]
    return sum(part.shape.num_elements() * part.dtype.size for part in parts)


@pytest.mark.parametrize(
    ("shape", "layout", "stage"),
    [
        ("data:4", "", "none"),
        ("data:4", "", "parameters"),
        ("data:2;model:2", "heads:model;ffn:model;vocab:model", "optimizer"),
    ],
)
def test_bytes_are_those_of_the_arrays(shape, layout, stage):
    totals = planned(shape, layout, stage).totals()
    trainer = trainer_of(shape, layout, stage)
    trainer.build(tfdist.data.ArraySource((TOKENS, NEXT)))
    assert totals["parameters"] == bytes_per_device(trainer.model.variables)
    assert totals["slots"] == bytes_per_device(v for v in trainer.model.optimizer.variables if v.shape.rank)


def collectives(trainer, folder: pathlib.Path) -> collections.Counter:
    """Returns the collectives of one step on one device, by the operation after which DTensor inserted each."""
    trainer.fit((TOKENS, NEXT), batch_size=8, steps=1)
    tf.profiler.experimental.start(str(folder))
    trainer.fit((TOKENS, NEXT), batch_size=8, steps=1)
    tf.profiler.experimental.stop()
    [file] = folder.rglob("*.xplane.pb")
    trace = xplane_pb2.XSpace.FromString(file.read_bytes())
    names = [
        plane.event_metadata[e.metadata_id].name for plane in trace.planes for line in plane.lines for e in line.events
    ]
    found = collections.Counter(name.split(":")[0] for name in names if name.rpartition(":")[2] in KINDS)
    return collections.Counter({name: count // trainer.strategy.devices.mesh.size for name, count in found.items()})


def test_sequence_parallelism_holds_less():
    tensor = "heads:model;ffn:model"
    held = [planned("data:1;model:4", rules).totals()["activations"] for rules in (tensor, f"{tensor};sequence:model")]
    assert held[1] < held[0]


def test_what_the_update_sends():
    def kinds(stage):
        return [(one.purpose, one.kind) for one in planned("data:4", stage=stage).traffic]

    gradients = ("gradients, together", "all-reduce")
    assert kinds("none") == [gradients]
    alone = ("gradients, one by one", "all-reduce")
    assert kinds("optimizer") == [gradients, ("updated variables", "all-gather")]
    assert kinds("gradients") == [alone, ("updated variables", "all-gather")]
    assert kinds("parameters") == [alone, ("variables, forward", "all-gather"), ("variables, backward", "all-gather")]


def test_layers_gather_sharded_parameters_in_turn_and_once_more_backward(tmp_path):
    found = collectives(trainer_of("data:4", stage="parameters", optimizer="sgd"), tmp_path)
    gathers = [name for name in found if "AllGather" in name]
    layers = {
        f"block_{i}_{name}"
        for i in range(2)
        for name in ("attention_norm", "attention", "ffn_norm", "ffn_in", "ffn_out")
    }
    layers |= {"final_norm", "logits"}
    assert layers_in(gathers) == layers
    waits = [name for name in found if "/Max/" in name]
    assert layers_in(waits) == layers  # otherwise all would be gathered up front
    backward = [name for name in gathers if not layers_in([name])]
    assert len(backward) > len(layers)
    assert sum("AllReduce" in name and "gradient_tape" in name for name in found) > 10  # one message would need all


def layers_in(names):
    found = (re.search(r"transformer\w*/(\w+?)_\d+/", name) for name in names)
    return {match[1] for match in found if match}


def test_slots_are_the_optimizer_s():
    assert planned("data:1", optimizer="sgd").totals()["slots"] == 0
    plain = planned("data:1", optimizer="adam").totals()
    assert plain["slots"] == 2 * plain["parameters"]


def searched(shape, memory, rules=""):
    mesh = parse_mesh(shape)
    return layout_plan.cheapest_layout(
        abstract_model(), mesh, parse_layout(rules, mesh), Shard("none", "data"), 8, memory
    )


def test_the_search_takes_what_sends_least_and_fits():
    """Without sharding nothing is sent, until memory is too small for replicated variables."""
    shape = "data:1;model:2"
    whole = sum(planned(shape).totals().values())
    assert searched(shape, whole).rules == {"batch": "data"}
    plan = searched(shape, whole - 1)
    assert set(plan.rules.values()) == {"data", "model"} and sum(plan.totals().values()) < whole
    tighter = searched(shape, sum(plan.totals().values()) - 1)
    assert sum(tighter.totals().values()) < sum(plan.totals().values()) and len(tighter.rules) >= len(plan.rules)
    assert searched(shape, whole, "ffn:model").rules == {"batch": "data", "ffn": "model"}


def test_the_search_says_what_the_least_would_be():
    with pytest.raises(InputError, match="the smallest of which needs .* Use more devices"):
        searched("data:2;model:2", 1000)


def test_a_model_without_variables_cannot_be_planned():
    with pytest.raises(InputError, match="a model that creates its variables immediately"):
        layout_plan.AbstractModel(lambda: (keras.Sequential([keras.layers.Dense(4)]), keras.optimizers.SGD()))


class Inner(keras.layers.Layer):
    def __init__(self):
        super().__init__(name="block")
        self.dense = keras.layers.Dense(4, name="dense")

    def build(self, shape):
        self.dense.build(shape)

    def call(self, inputs):
        return self.dense(inputs)


def test_layers_inside_others_are_named_not_counted():
    made = layout_plan.AbstractModel(lambda: (keras.Sequential([keras.Input((4,)), Inner()]), keras.optimizers.SGD()))
    plan = plan_of(made, "data:1;model:2", "out:model")
    assert len(plan.unknown_layers) == 1 and plan.unknown_layers[0].endswith("dense")
    assert plan.totals()["parameters"] == (4 * 4 + 4) * 4 / 2


def nested(inputs):
    return keras.Sequential([keras.Input((8, 16)), keras.layers.Dense(16)])(inputs)


def cross_attention(inputs):
    return keras.layers.MultiHeadAttention(4, 4)(inputs, keras.layers.ZeroPadding1D((0, 4))(inputs))


def pooled(inputs):
    split = tfdist.constrain(keras.layers.Dense(16)(inputs), "batch context embed")
    return keras.layers.GlobalAveragePooling1D()(split)


@pytest.mark.parametrize(
    ("build", "layout", "unknown", "unclear"),
    [
        (nested, "out:model", 2, 0),
        (cross_attention, "context:model", 0, 1),
        (pooled, "context:model", 0, 1),
        (keras.layers.Dense(16), "in:model", 0, 1),
        (keras.layers.Dense(16, lora_rank=2), "", 0, 1),
        (keras.layers.Dense(16), "out:model", 0, 0),
    ],
    ids=["nested", "cross-attention", "pooled", "rows alone", "LoRA", "columns"],
)
def test_what_a_plan_does_not_know_is_named(build, layout, unknown, unclear):
    def make():
        inputs = keras.Input((8, 16))
        return keras.Model(inputs, build(inputs)), keras.optimizers.SGD()

    plan = plan_of(layout_plan.AbstractModel(make), "data:2;model:2", layout)
    assert (len(plan.unknown_layers), len(plan.unclear_layers)) == (unknown, unclear)
    assert all(isinstance(name, str) for name in (*plan.unknown_layers, *plan.unclear_layers))


def test_experts_widths_and_attention_without_constraints_are_counted():
    sent = planned("data:1;model:2", "expert_ffn:model", experts=4).traffic
    assert ("all-reduce", "model") in [(one.kind, one.axis) for one in sent if "experts' products" in one.purpose]

    def plain():
        inputs = keras.Input((8, 16))
        return keras.Model(inputs, keras.layers.MultiHeadAttention(4, 4)(inputs, inputs)), keras.optimizers.SGD()

    found = plan_of(layout_plan.AbstractModel(plain), "data:1;context:2", "context:context")
    assert "context" in found.dims
    assert [one.kind for one in found.traffic] == ["all-gather", "all-reduce"]


def test_experts_on_the_batch_s_axis_are_counted():
    assert layout_plan.uncounted_rules({"batch": "data", "experts": "data", "in": "data"}) == ["in:data"]


def test_a_plan_refuses_what_training_would():
    with pytest.raises(InputError, match="shards sequence of .*over the 3 devices"):
        planned("data:1;context:3", "sequence:context")


@pytest.mark.parametrize("named", [{}, {".*kernel": "* * embed ffn"}])
@pytest.mark.parametrize(
    "convolution", [keras.layers.Conv2D, keras.layers.Conv2DTranspose, keras.layers.SeparableConv2D]
)
def test_kernels_of_convolutions_stay_whole(convolution, named):
    def make():
        layer = convolution(4, 3, name="first", use_bias=False)
        return tfdist.name_dims(keras.Sequential([keras.Input((6, 6, 2)), layer]), named), keras.optimizers.SGD()

    rules = "ffn:model" if named else "out:model"
    with pytest.raises(
        InputError, match="shards (ffn|out) of .*first/.*kernel over the axis model; the engine cannot shard kernels"
    ):
        plan_of(layout_plan.AbstractModel(make), "data:1;model:2", rules)
    made = layout_plan.AbstractModel(make)
    plan = plan_of(made, "data:2;model:1", rules)  # no sharding
    assert plan.totals()["parameters"] == made.model.count_params() * 4 > 0


def test_constraints_without_effect_hold_nothing():
    inner = planned("data:1").totals()["activations"]
    layers = [layer for layer in transformer().layers if not isinstance(layer, keras.layers.Identity)]
    tensors = [t for layer in layers for t in keras.tree.flatten(layer.output)]
    assert inner == sum(8 * int(np.prod(t.shape[1:])) * 4 for t in tensors)


@pytest.mark.parametrize(("schedule", "idle", "makespan"), [("gpipe", 1 - 48 / 90, 30), ("2bw", 1 / 3, 24)])
def test_idle_time_of_stages_that_differ(schedule, idle, makespan):
    """Three stages compute for 12, 24 and 12 in a step; without a flush, only the slowest one counts."""
    found = idle_and_makespan(make_schedule(schedule, 3, 4), [1.0, 2.0, 1.0], [2.0, 4.0, 2.0])
    assert found == pytest.approx((idle, makespan))
