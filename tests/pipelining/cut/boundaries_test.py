"""Where models are cut, what is refused, and the measured seconds of each call."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.pipelining.cut.example_models import build
from tfdist import keras_internals, models
from tfdist.errors import InputError
from tfdist.pipelining.cutting import cut_at, cut_model, trace_model
from tfdist.pipelining.operation_timing import measure_seconds

pytestmark = pytest.mark.filterwarnings("ignore:.* was passed an input with a mask attached to it")


def last_calls(cut):
    return [cut.call_names(stage)[-1] for stage in cut.stages]


@pytest.mark.parametrize(
    ("name", "cut", "expected"),
    [
        ("mlp", "hidden_0,hidden_1", ["hidden_0", "hidden_1", "logits"]),
        ("skip", "early,third", ["early", "third", "last"]),
        ("nested", "first", ["body/first", "joined"]),
        ("nested", "body/norm,a", ["body/norm", "body/head/a", "joined"]),
        ("nested", "head", ["body/head/b", "joined"]),
        ("nested", "body", ["body/head/b", "joined"]),
        ("nested_twice", "block/dense", ["block/dense", "last"]),
        ("many", "aside", ["aside", "main"]),
    ],
)
def test_stages_end_after_named_layers(name, cut, expected):
    model, _ = build(name)
    assert last_calls(cut_model(model, cut, len(expected))) == expected


def test_side_branches_are_computed_where_they_are_used():
    """The projection of a residual, and an early output, are next to the calls that use or make their tensors."""
    inputs = keras.Input((4,))
    x = keras.layers.Dense(4, name="a")(inputs)
    y = keras.layers.Dense(4, name="c")(keras.layers.Dense(4, name="b")(x))
    x = keras.layers.Add(name="add")([keras.layers.Dense(4, name="projection")(x), y])
    mean = keras.ops.mean(x, axis=1, keepdims=True)
    early = keras.layers.Dense(1, name="early")(x)
    late = keras.layers.Dense(1, name="late")(keras.layers.Dense(4, name="d")(x - mean))
    calls = [call.rsplit("_", 1)[0] for call in cut_names(keras.Model(inputs, [late, early]))]
    assert calls == ["a", "b", "c", "projection", "add", "early", "mean", "subtract", "d", "late"]


def cut_names(model):
    cut = cut_model(model, "auto", 1)
    return cut.call_names(cut.stages[0])


@pytest.mark.parametrize(
    "name", ["mlp", "cnn", "transformer(layers=4)", "transformer(layers=4, experts=2)", "resnet50"]
)
def test_all_models_are_cut_into_about_equal_stages(name):
    shape, classes = ((6,), 11) if "transformer" in name else ((32, 32, 3), 11)
    with keras_internals.deferred_weights():
        traced = trace_model(models.build(name, shape, classes))
    for by, rows in (("parameters", 0), ("memory", 1)):
        cuts = [*(cut_at(traced, [i]) for i in range(1, len(traced.graph.order))), cut_at(traced, [])]
        growing = [0, *(cost(cut, cut.stages[0], rows) for cut in cuts)]
        largest = max(after - before for before, after in itertools.pairwise(growing))
        for stages in (2, 3, 4):
            cut = cut_model(traced, f"balanced(by={by})", stages)
            assert len(cut.stages) == stages and all(stage.calls for stage in cut.stages)
            assert max(cost(cut, stage, rows) for stage in cut.stages) <= 1.05 * (growing[-1] / stages + largest)


def cost(cut, stage, rows):
    return sum(map(keras_internals.bytes_of, stage.variables.all)) + rows * cut.activation_bytes(stage)


def test_a_balance_by_time_takes_the_given_times():
    model, _ = build("mlp")
    seconds = {"flatten": 0.0, "hidden_0": 1.0, "hidden_1": 1.0, "hidden_2": 1.0, "logits": 9.0}
    cut = cut_model(model, "balanced(by=time)", 2, seconds=lambda graph: [seconds[call.name] for call in graph.calls])
    assert last_calls(cut) == ["hidden_2", "logits"]


def test_calls_of_a_layer_with_state_stay_together():
    inputs = keras.Input((4,))
    norm = keras.layers.BatchNormalization(name="norm")
    x = norm(keras.layers.Dense(4, name="between")(norm(inputs)))
    for i in range(3):
        x = keras.layers.Dense(4, name=f"dense_{i}")(x)
    model = keras.Model(inputs, x)
    for stages in (2, 3, 4):
        cut = cut_model(model, "auto", stages)
        assert cut.call_names(cut.stages[0])[:3] == ["norm", "between", "norm (2)"]
    with pytest.raises(InputError, match="norm in several stages. Cut elsewhere"):
        cut_model(model, "auto", 5)
    norm.trainable = False  # it then updates nothing
    assert len(cut_model(model, "between", 2).shared) == 4


class OwnStep(keras.Model):
    def train_step(self, data):
        return super().train_step(data)


class OwnLoss(keras.Sequential):
    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs)


def functional(kind=keras.Model):
    inputs = keras.Input((4,))
    return kind(inputs, keras.layers.Dense(2)(keras.layers.Dense(2)(inputs)))


def dropped_twice():
    inputs = keras.Input((4,))
    drop = keras.layers.Dropout(0.5, name="drop")
    return keras.Model(inputs, drop(keras.layers.Dense(2, name="dense")(drop(inputs))))


def lowered(sparse: bool = False):
    """A model whose first layer returns text, and whose second may return a sparse tensor."""
    lower = keras.layers.Lambda(tf.strings.lower, output_shape=(1,), name="lower")
    mode = {"output_mode": "multi_hot", "sparse": True} if sparse else {}
    words = keras.layers.StringLookup(vocabulary=["a", "b"], name="words", **mode)
    after = [keras.layers.Dense(2, name="dense")] if sparse else [keras.layers.Embedding(3, 2, name="table")]
    last = keras.layers.Dense(2, name="last")
    return keras.Sequential([keras.Input((1,), dtype="string"), lower, words, *after, last])


def named(name):
    return lambda: build(name)[0]


REFUSED = [
    (lambda: functional(OwnStep), "auto", 2, "Keras's own `train_step`"),
    (lambda: OwnLoss([keras.Input((4,)), keras.layers.Dense(2)]), "auto", 1, "Keras's own `compute_loss`"),
    (lambda: keras.Sequential([keras.layers.Dense(2)]), "auto", 1, "Add a keras.Input as its first layer"),
    (lambda: "cnn", "auto", 2, "Received: str"),
    (functional, "auto", 3, "3 stages for functional"),
    (named("mlp"), "hidden_0", 3, "Name 2 layers, or use --cut=auto"),
    (named("mlp"), "hiden_0", 2, 'Did you mean "hidden_0"'),
    (
        named("mlp"),
        "hidden_1,hidden_0",
        3,
        "with hidden_0 last or out of order. The order is flatten, hidden_0, hidden_1",
    ),
    (named("mlp"), "logits", 2, "not its last one"),
    (named("twice"), "dense", 2, "which matches dense, dense (2)"),
    (named("nested_twice"), "block", 2, "which matches block, block (2)"),
    (dropped_twice, "dense", 2, "with calls of drop in several"),
    (lowered, "lower", 2, "a later stage uses the result of lower. Cut after the layers that use it"),
    (lambda: lowered(sparse=True), "words", 2, "a later stage uses the result of words"),
    (lowered, "auto", 4, "a later stage uses the result of lower"),
    (named("mlp"), "balanced(by=rows)", 2, "time, parameters or memory"),
]


@pytest.mark.parametrize(("make", "cut", "stages", "message"), REFUSED)
def test_what_cannot_be_cut_is_refused_in_one_line(make, cut, stages, message):
    keras.utils.clear_session(free_memory=False)
    with pytest.raises(InputError) as refused:
        cut_model(make(), cut, stages)
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_text_stays_in_the_stage_that_makes_it():
    assert [last_calls(cut_model(lowered(), "auto", stages)) for stages in (2, 3)] == [
        ["table", "last"],
        ["words", "table", "last"],
    ]


def test_subclassed_layers_are_calls_like_others():
    class Scaled(keras.layers.Layer):
        def build(self, shape):
            self.inner = keras.layers.Dense(shape[-1])
            self.inner.build(shape)

        def call(self, x):
            return self.inner(x) * 2

    inputs = keras.Input((4,))
    model = keras.Model(inputs, keras.layers.Dense(2, name="last")(Scaled(name="scaled")(inputs)))
    cut = cut_model(model, "scaled", 2)
    _, sent = cut.stages[0].call(cut.named_inputs(np.ones((2, 4))), [])
    outputs, _ = cut.stages[1].call({}, sent)
    np.testing.assert_array_equal(outputs, model(np.ones((2, 4))))
    assert [len(stage.variables.all) for stage in cut.stages] == [2, 2]


def heavy():
    inputs = keras.Input((256,))
    x = keras.layers.Dense(256, name="light_0")(inputs)
    x = keras.layers.Dense(256, name="light_1")(x)
    x = keras.layers.Dense(256, name="light_3")(x)
    x = keras.layers.Lambda(_many_products, name="products")(x)
    return keras.Model(inputs, keras.layers.Dense(256, name="light_2")(x))


def _many_products(x):
    for _ in range(40):
        x = keras.ops.matmul(keras.ops.matmul(x, keras.ops.transpose(x)), x)
    return x


@pytest.mark.processes
def test_a_heavy_layer_without_parameters_is_found_by_time():
    with keras_internals.deferred_weights():
        model = heavy()
    traced = trace_model(model)
    found = dict(zip([call.name for call in traced.graph.calls], measure_seconds(traced.graph, rows=128), strict=True))
    assert found["light_0"] >= 0 and found["products"] > 3 * found["light_1"]
    assert found["light_1"] == found["light_3"]  # equal calls are measured once
    assert all(keras_internals.value_of(variable) is None for variable in model.variables)
    by_time = cut_model(traced, "balanced(by=time)", 2, seconds=lambda graph: measure_seconds(graph, rows=128))
    by_parameters = cut_model(traced, "balanced(by=parameters)", 2)
    first, second = map(by_time.call_names, by_time.stages)
    assert "products" in (first[-1], second[0]) and len(by_parameters.call_names(by_parameters.stages[0])) == 2


@pytest.mark.parametrize("name", ["experts", "tied", "masked", "several", "nested_twice", "operations", "regularized"])
def test_every_kind_of_call_can_be_measured(name):
    model, _ = build(name)
    before = model.get_weights()
    graph = trace_model(model).graph
    found = measure_seconds(graph, rows=2)
    assert len(found) == len(graph.calls) and min(found) >= 0
    assert all((one == other).all() for one, other in zip(model.get_weights(), before, strict=True))
