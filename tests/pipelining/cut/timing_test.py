"""Seconds of each call, measured."""

import keras
import pytest

from tests.pipelining.cut.example_models import build
from tfdist import keras_internals
from tfdist.pipelining.cut import cut_model, describe_stages, measure_seconds, trace_model, without_values


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
    with without_values():
        model = heavy()
    traced = trace_model(model)
    found = dict(zip([call.name for call in traced.graph.calls], measure_seconds(traced.graph, rows=128), strict=True))
    assert found["light_0"] >= 0 and found["products"] > 3 * found["light_1"]
    assert found["light_1"] == found["light_3"]  # equal calls are measured once
    assert all(keras_internals.value_of(variable) is None for variable in model.variables)
    by_time = describe_stages(cut_model(traced, "balanced(by=time)", 2, rows=128))
    by_parameters = describe_stages(cut_model(traced, "balanced(by=parameters)", 2, rows=128))
    assert "products" in (by_time[0].calls[-1], by_time[1].calls[0]) and len(by_parameters[0].calls) == 2


@pytest.mark.filterwarnings("ignore:.* was passed an input with a mask attached to it")
@pytest.mark.parametrize("name", ["experts", "tied", "masked", "several", "nested_twice", "operations", "regularized"])
def test_every_kind_of_call_can_be_measured(name):
    model, _ = build(name)
    before = model.get_weights()
    graph = trace_model(model).graph
    found = measure_seconds(graph, rows=2, repeats=1)
    assert len(found) == len(graph.calls) and min(found) >= 0
    assert all((one == other).all() for one, other in zip(model.get_weights(), before, strict=True))
