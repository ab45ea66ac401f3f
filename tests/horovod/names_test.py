"""The names of tfdist.horovod: those of Horovod, with its arguments in its order."""

import importlib
import inspect

import pytest

import tfdist.horovod as hvd
from tfdist.errors import InputError
from tfdist.gradients.compression import METHODS

ORIGINAL = pytest.importorskip("horovod.tensorflow")
OF_KERAS = importlib.import_module("horovod.tensorflow.keras")
OF_PLAIN_KERAS = importlib.import_module("horovod.keras")


def arguments(function):
    return [name for name in inspect.signature(function).parameters if name != "self"]


@pytest.mark.parametrize(
    ("name", "home"),
    [
        ("allreduce", ORIGINAL),
        ("grouped_allreduce", ORIGINAL),
        ("allgather", ORIGINAL),
        ("grouped_allgather", ORIGINAL),
        ("broadcast", ORIGINAL),
        ("broadcast_", ORIGINAL),
        ("alltoall", ORIGINAL),
        ("reducescatter", ORIGINAL),
        ("grouped_reducescatter", ORIGINAL),
        ("broadcast_variables", ORIGINAL),
        ("broadcast_object", ORIGINAL),
        ("allgather_object", ORIGINAL),
        ("broadcast_global_variables", OF_KERAS),
        ("join", ORIGINAL),
        ("size_op", ORIGINAL),
        ("process_set_included_op", ORIGINAL),
        ("check_num_rank_power_of_2", ORIGINAL),
        ("start_timeline", ORIGINAL),
        ("DistributedGradientTape", ORIGINAL),
        ("PartialDistributedGradientTape", ORIGINAL),
        ("DistributedOptimizer", OF_KERAS),
        ("PartialDistributedOptimizer", OF_PLAIN_KERAS),
        ("load_model", OF_KERAS),
    ],
)
def test_arguments_stand_where_horovods_do(name, home):
    theirs = arguments(getattr(home, name))
    assert arguments(getattr(hvd, name))[: len(theirs)] == theirs


@pytest.mark.parametrize(
    "name", [name for name in dir(OF_KERAS.callbacks) if name.endswith(("Callback", "Checkpoint"))]
)
def test_callbacks_take_horovods_arguments(name):
    assert arguments(getattr(hvd.callbacks, name)) == arguments(getattr(OF_KERAS.callbacks, name))


def test_every_public_name_of_horovods_elastic_keras_is_there():
    assert set(OF_KERAS.elastic.__all__) <= set(hvd.elastic.__all__)


def test_every_name_can_be_had():
    assert all(getattr(hvd, name) is not None for name in hvd.__all__)
    assert hvd.__all__ == sorted(hvd.__all__)


def test_operations_have_horovods_numbers():
    for name in ("Average", "Sum", "Adasum", "Min", "Max", "Product"):
        assert getattr(hvd, name) == getattr(ORIGINAL, name)


def test_compression_has_every_method():
    assert {"none", "fp16", *METHODS} <= set(dir(hvd.Compression))
    assert hvd.Compression.powersgd(rank=4).text == "powersgd(rank=4)"
    assert hvd.Compression.bf16.text == "bf16"
    assert hvd.Compression("topk(ratio=0.1)|fp16").text == "topk(ratio=0.1)|fp16"
    with pytest.raises(AttributeError, match="has no method powersdg. Did you mean .powersgd."):
        _ = hvd.Compression.powersdg


def test_before_init_a_rank_has_no_number():
    assert not hvd.is_initialized()
    with pytest.raises(InputError, match=r"hvd.init\(\) must be called first"):
        hvd.rank()
