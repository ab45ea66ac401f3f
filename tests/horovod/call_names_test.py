"""The names of tfdist.horovod are those of Horovod, with its arguments in its order."""

import importlib
import inspect

import pytest
import tensorflow as tf

import tfdist.horovod as hvd
from tfdist.errors import InputError
from tfdist.gradients.compression import METHODS

ORIGINAL = pytest.importorskip("horovod.tensorflow")
OF_KERAS = importlib.import_module("horovod.tensorflow.keras")
OF_PLAIN_KERAS = importlib.import_module("horovod.keras")


def arguments(function):
    return [name for name in inspect.signature(function).parameters if name != "self"]


def public(module):
    """Returns the public functions and classes of one of Horovod's modules."""
    found = {name: value for name, value in vars(module).items() if not name.startswith("_") and callable(value)}
    return {name: value for name, value in found.items() if getattr(value, "__module__", "").startswith("horovod")}


FUNCTIONS = [
    pytest.param(name, value, id=f"{module.__name__}.{name}")
    for module in (ORIGINAL, OF_KERAS)
    for name, value in public(module).items()
    if not isinstance(getattr(hvd, name, None), type) and name not in {*hvd._ALTERNATIVES, "gpu_available"}
]
FUNCTIONS.append(pytest.param("PartialDistributedOptimizer", OF_PLAIN_KERAS.PartialDistributedOptimizer, id="partial"))
OTHER_FORMS = {"value": "tensor"}


def received(function, *args, **kwargs):
    """Returns the arguments by name with which a call of this package's function would be made, without making it."""
    seen = []

    def note(*args, **kwargs):
        seen.append(inspect.signature(plain).bind(*args, **kwargs).arguments)

    plain = inspect.unwrap(function)
    if plain is function:
        note(*args, **kwargs)
    else:  # wrapped by the decorator for the other form
        cell = next(c for c in function.__closure__ if c.cell_contents is plain)
        cell.cell_contents = note
        try:
            function(*args, **kwargs)
        finally:
            cell.cell_contents = plain
    return seen[0]


@pytest.mark.parametrize(("name", "theirs"), FUNCTIONS)
def test_every_signature_is_horovods(name, theirs):
    """Each argument is received under Horovod's name, when passed by name and by position, with a value of its type."""
    parameters = inspect.signature(theirs).parameters
    named = [p for p in parameters.values() if p.kind == p.POSITIONAL_OR_KEYWORD]
    values = {p.name: p.default if p.default is not p.empty else object() for p in named}
    values |= {"name": "a name"} if "name" in values else {}
    expected = {OTHER_FORMS.get(key, key): value for key, value in values.items()}
    ours = getattr(hvd, name)
    assert {key: value for key, value in received(ours, **values).items() if key in expected} == expected
    assert {key: value for key, value in received(ours, *values.values()).items() if key in expected} == expected
    for key, value in values.items():  # a default is Horovod's own, or equal to it
        mine = inspect.signature(ours).parameters[OTHER_FORMS.get(key, key)].default
        same = mine is inspect.Parameter.empty or mine == value or mine is hvd.Compression.none
        assert same or key == "name", (key, mine, value)


FP16 = hvd.Compression.fp16


@pytest.mark.parametrize(
    ("function", "call", "expected"),
    [
        (hvd.allreduce, ("a name",), {"name": "a name"}),
        (hvd.allreduce, (None, True), {"name": None, "average": True}),
        (
            hvd.allreduce,
            (None, None, 0.5, 2.0),
            {"name": None, "average": None, "prescale_factor": 0.5, "postscale_factor": 2.0},
        ),
        (hvd.allreduce, (False,), {"average": False}),
        (hvd.allreduce, (None, "/gpu:0"), {"average": None, "device_dense": "/gpu:0"}),
        (hvd.reducescatter, ("a name",), {"name": "a name"}),
        (hvd.reducescatter, (None, hvd.Sum), {"name": None, "op": hvd.Sum}),
        (hvd.reducescatter, ("/cpu:0",), {"device_dense": "/cpu:0"}),
        (hvd.reducescatter, ("GPU:0", FP16), {"device_dense": "GPU:0", "compression": FP16}),
    ],
)
def test_operations_are_called_in_both_forms(function, call, expected):
    assert received(function, "x", *call) == {"tensor": "x", **expected}


def test_an_argument_given_twice_is_pythons_error():
    for call in (lambda: hvd.allreduce("x", value="y"), lambda: hvd.allreduce("x", "a name", name="another")):
        with pytest.raises(TypeError, match="multiple values for argument"):
            call()


@pytest.mark.parametrize(
    ("name", "home"),
    [
        *((n, OF_KERAS.callbacks) for n in dir(OF_KERAS.callbacks) if n.endswith(("Callback", "Checkpoint"))),
        ("TensorFlowKerasState", ORIGINAL.elastic),
        ("TensorFlowState", ORIGINAL.elastic),
        ("KerasState", OF_KERAS.elastic),
        ("CommitStateCallback", OF_KERAS.elastic),
        ("UpdateBatchStateCallback", OF_KERAS.elastic),
        ("UpdateEpochStateCallback", OF_KERAS.elastic),
        ("ObjectState", ORIGINAL.elastic),
        ("run", ORIGINAL.elastic),
    ],
)
def test_callbacks_and_states_take_horovods_arguments(name, home):
    ours = hvd.callbacks if home is OF_KERAS.callbacks else hvd.elastic
    assert arguments(getattr(ours, name)) == arguments(getattr(home, name))


@pytest.mark.parametrize("module", [ORIGINAL, OF_KERAS, OF_PLAIN_KERAS], ids=lambda module: module.__name__)
def test_every_public_name_of_horovods_is_there_or_is_refused_by_name(module):
    for name in [*public(module), "mpi_ops", "util", "elastic", "callbacks", "compression"]:
        if name in hvd._ALTERNATIVES:
            with pytest.raises(AttributeError, match=f"tfdist.horovod has no {name}. Received: hvd.{name}. Use "):
                getattr(hvd, name)
        else:
            assert getattr(hvd, name) is not None
    assert {*public(ORIGINAL.elastic), *OF_KERAS.elastic.__all__} <= set(dir(hvd.elastic))


def test_modules_that_scripts_import_from():
    from tfdist.horovod.mpi_ops import allreduce, size  # noqa: PLC0415

    assert (allreduce, size) == (hvd.allreduce, hvd.size)
    variable = tf.Variable(1.0)
    assert hvd.util.refs_to_vars(hvd.util.vars_to_refs([variable, [variable]])) == [variable, [variable]]
    assert hvd.util._executing_eagerly() and hvd._executing_eagerly()
    assert hvd.mpi_ops._basics is ORIGINAL.mpi_ops._basics
    with pytest.raises(InputError, match="tfdist.horovod.mpi_ops has no nothing. Received: nothing. Use the names of "):
        _ = hvd.mpi_ops.nothing
    assert not hasattr(hvd.util, "nothing")
    assert hvd.gpu_available("tensorflow") is bool(tf.config.list_physical_devices("GPU"))
    hvd.check_extension("horovod.tensorflow", "HOROVOD_WITH_TENSORFLOW", ORIGINAL.__file__, "mpi_lib")
    with pytest.raises(ImportError, match="Extension horovod.torch has not been built"):
        hvd.check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", ORIGINAL.__file__, "no_lib")


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
