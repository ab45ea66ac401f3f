"""The planned communication of a step equals what the engine's compiler inserts: kinds, axes, and exact bytes."""

import collections
import functools
import json
import pathlib
import subprocess
import sys

import keras
import pytest

import tfdist
from tfdist.config.layouts import parse_layout, parse_shard
from tfdist.config.mesh import parse_mesh
from tfdist.planning import layout_plan

WORKER = pathlib.Path(__file__).with_name("mesh_collectives_worker.py")
TRANSFORMER = {"input_shape": (8,), "classes": 32, "layers": 2, "width": 16, "heads": 4}
EXPERTS = {**TRANSFORMER, "experts": 4}
MLP = {"input_shape": (16,), "classes": 12, "hidden": (32, 8)}
TENSOR = "heads:model;ffn:model"


def case(model, arguments, mesh_shape, layout="", shard="none"):
    strategy = {"mesh_shape": mesh_shape, "layout": layout, "shard": shard, "shard_min_elements": 16}
    return {"model": model, "arguments": arguments, "strategy": strategy}


CASES = {
    "data": case("mlp", MLP, "data:4"),
    "convolutions": case("cnn", {"input_shape": (8, 8, 1), "classes": 12, "filters": (8, 16)}, "data:4"),
    "columns of kernels": case("mlp", MLP, "data:2;model:2", "out:model"),
    "megatron": case("transformer", TRANSFORMER, "data:1;model:2", TENSOR),
    "megatron and data": case("transformer", TRANSFORMER, "data:2;model:2", TENSOR),
    "sequence": case("transformer", TRANSFORMER, "data:2;model:2", f"{TENSOR};sequence:model"),
    "context": case("transformer", TRANSFORMER, "data:1;context:2", "sequence:context;context:context"),
    "context and heads": case(
        "transformer", TRANSFORMER, "data:1;model:2;context:2", f"{TENSOR};sequence:context;context:context"
    ),
    "vocabulary": case("transformer", TRANSFORMER, "data:2;model:2", f"{TENSOR};vocab:model"),
    "experts on the batch's axis": case("transformer", EXPERTS, "data:2", "experts:data"),
    "experts on another": case("transformer", EXPERTS, "data:1;model:2", "experts:model"),
    "wide experts": case("transformer", EXPERTS, "data:2;model:2", "experts:data;expert_ffn:model"),
    "experts and context": case(
        "transformer", EXPERTS, "data:2;context:2", "experts:data;sequence:context;context:context"
    ),
    "sharded experts": case("transformer", EXPERTS, "data:2", "experts:data", "parameters"),
    "optimizer": case("transformer", TRANSFORMER, "data:4", shard="optimizer"),
    "gradients": case("transformer", TRANSFORMER, "data:2;model:2", f"{TENSOR};vocab:model", "gradients"),
    "parameters": case("transformer", TRANSFORMER, "data:2;model:2", f"{TENSOR};vocab:model", "parameters"),
}


QUICK = ("megatron", "megatron and data", "sequence", "context", "experts on the batch's axis", "parameters")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Returns the collectives of a case's program, (kind, axis, bytes); one process compiles all cases that are as quick."""

    @functools.cache
    def programs(names):
        folder = tmp_path_factory.mktemp("programs")
        command = [sys.executable, str(WORKER), json.dumps([CASES[name] for name in names]), str(folder)]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr[-3000:]
        return {
            name: [tuple(one) for one in json.loads((folder / f"{number}.json").read_text())]
            for number, name in enumerate(names)
        }

    return lambda name: programs(QUICK if name in QUICK else tuple(name for name in CASES if name not in QUICK))[name]


def planned(name):
    chosen = CASES[name]
    options = chosen["strategy"]
    mesh = parse_mesh(options["mesh_shape"])
    shard = parse_shard(options["shard"], "data", options["shard_min_elements"], mesh)
    build = getattr(tfdist.models, chosen["model"])
    abstract_model = layout_plan.AbstractModel(lambda: (build(**chosen["arguments"]), keras.optimizers.SGD()))
    return abstract_model.plan(mesh, parse_layout(options["layout"], mesh), shard, batch_size=8).traffic


def totals(sent):
    found = collections.Counter()
    for kind, axis, size in sent:
        found[kind, axis] += size
    return dict(found)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.full) for name in CASES]
)
def test_a_step_sends_what_its_plan_says(name, compiled):
    assert totals((one.kind, one.axis, one.bytes) for one in planned(name)) == totals(compiled(name))


def test_a_block_sends_what_megatron_s_does(compiled):
    """Two all-reduces forward and two backward per block, and no weights; with several shards of rows, also gradients."""
    assert compiled("megatron") == [("all-reduce", "model", 8 * 8 * 16 * 4)] * 2 * (2 + 2)
    of_model = [one for one in compiled("megatron and data") if one[1] == "model"]
    assert of_model == [("all-reduce", "model", 4 * 8 * 16 * 4)] * 2 * (2 + 2)
    assert [one.kind for one in planned("megatron and data") if one.axis == "data"] == ["all-reduce"]


def test_sequence_parallelism_gathers_between_blocks(compiled):
    """After norms in the forward pass, and for gradients of what blocks add: two each per block, besides its all-reduces."""
    whole = 4 * 8 * 16 * 4
    of_activations = collections.Counter(one for one in compiled("sequence") if one[1:] == ("model", whole))
    # ... and before the logits, and for the gradient of the tables
    assert of_activations == {("all-reduce", "model", whole): 2 * 4, ("all-gather", "model", whole): 2 * 4 + 2}


def test_context_parallelism_gathers_keys_and_values(compiled):
    of_one = 8 * 8 * 16 * 4
    of_blocks = collections.Counter(one for one in compiled("context") if one[2] == of_one)
    # ... and for the gradient of the tables; attention's weight gradients have 1024 bytes, not one message per row
    assert of_blocks == {("all-gather", "context", of_one): 2 * 2 + 1, ("all-reduce", "context", of_one): 2 * 2 + 2 * 2}


def test_experts_on_the_batch_s_axis_exchange_tokens(compiled):
    """To the experts and back, and the same for gradients."""
    places = 8 * 4 * 5 * 16 * 4 // 2  # rows, experts, capacity of each, width, bytes; per device
    found = [one for one in compiled("experts on the batch's axis") if one[0] == "all-to-all"]
    assert found == [("all-to-all", "data", places)] * 4
