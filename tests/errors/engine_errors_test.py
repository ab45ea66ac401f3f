"""The meaning of engines' exceptions, tested without an engine: the classes here have the same names."""

import pytest

from tfdist import errors
from tfdist.errors import ExitCode


class OpError(Exception):
    pass


class ResourceExhaustedError(OpError):
    pass


class UnavailableError(OpError):
    pass


class HorovodInternalError(RuntimeError):
    pass


_TENSORFLOW = (
    "{{function_node __wrapped__Add_device_/job:localhost}} OOM when allocating tensor with shape[1000,1000,10] and "
    "type float on /job:localhost/replica:0/task:0/device:CPU:0 by allocator cpu [Op:Add]"
)


@pytest.mark.parametrize(
    ("error", "start"),
    [
        (ResourceExhaustedError(_TENSORFLOW), "Out of memory: tried to allocate 38.1 MiB. Lower --batch_size"),
        (ResourceExhaustedError("shape[] and type double"), "Out of memory: tried to allocate 8 bytes."),
        (ResourceExhaustedError("shape[8] and type variant"), "Out of memory. Lower"),
        (
            ResourceExhaustedError("Out of memory while trying to allocate 2147483648 bytes."),
            "Out of memory: tried to allocate 2.0 GiB",
        ),
        (MemoryError("Unable to allocate 7.28 TiB for an array"), "Out of memory: tried to allocate 7.28 TiB."),
        (MemoryError(), "Out of memory. Lower --batch_size"),
    ],
)
def test_out_of_memory_says_how_much(error, start):
    found = errors.out_of_memory(error)
    assert found is not None
    assert str(found).startswith(start)
    assert "--devices" in str(found)
    assert found.exit_code == ExitCode.OUT_OF_MEMORY
    assert found.__cause__ is error


def test_out_of_memory_shows_its_notes_and_its_cause():
    error = ResourceExhaustedError(f"\x1b[1m{_TENSORFLOW}\x1b[0m\n\nDetected at node\n" + "x" * 1000)
    error.add_note("step 12")
    line = str(errors.out_of_memory(error))
    assert line.startswith("Out of memory (step 12): tried to allocate 38.1 MiB")
    assert "ResourceExhaustedError: OOM when allocating tensor with shape[1000,1000,10]" in line
    assert "\n" not in line and "\x1b" not in line
    assert len(line) < 500


_GRAPH = "Graph execution error:\n\nDetected at node {} defined at (most recent call last):\n"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            OpError(_GRAPH + 'File "a.py", line 3, in f\n\nindices[0] = 9\n\t [[{{node g}}]] [Op:__inference_f_1]'),
            "indices[0] = 9",
        ),
        (
            OpError(
                _GRAPH
                + "ValueError: no label\nTraceback (most recent call last):\n\n  File ..\n\nValueError: no label\n\n"
            ),
            "ValueError: no label",
        ),
        (
            OpError(
                "2 root error(s) found.\n  (0) INVALID_ARGUMENT:  too long.\n\t [[{{node g}}]]\n0 successful operations.\n"
            ),
            "too long",
        ),
        (OpError("{{function_node __wrapped__Mul}} Incompatible shapes [Op:Mul] name: "), "Incompatible shapes"),
        (
            ValueError("Exception encountered when calling A.call().\n\n\x1b[1mno x.\x1b[0m"),
            "Exception encountered when calling A.call(). no x",
        ),
    ],
)
def test_the_cause_of_an_error_is_its_line(error, line):
    assert errors.error_summary(error).startswith(f"{type(error).__name__}: {line}")


def raised(program):
    try:
        program()
    except ValueError as error:
        return error


def from_itself():
    try:
        raise ValueError("mine")
    except ValueError as error:
        raise error from error


def from_nothing():
    try:
        raise ResourceExhaustedError("OOM")
    except ResourceExhaustedError:
        raise ValueError("mine") from None


@pytest.mark.parametrize("program", [from_itself, from_nothing])
def test_errors_that_are_not_caused_by_a_lack_of_memory(program):
    assert errors.out_of_memory(raised(program)) is None


@pytest.mark.parametrize("error", [UnavailableError("gone"), ValueError("OOM"), OSError(12, "Cannot allocate memory")])
def test_other_errors_are_not_out_of_memory(error):
    assert errors.out_of_memory(error) is None


@pytest.mark.parametrize(
    ("error", "engine"),
    [
        (UnavailableError("gone"), True),
        (HorovodInternalError("gone"), True),
        (ResourceExhaustedError("OOM"), False),
        (ValueError("mine"), False),
    ],
)
def test_engine_errors_are_known_by_name(error, engine):
    assert errors.is_engine_error(error) is engine


def test_a_layout_that_does_not_compile_is_told_in_one_line():
    text = "main.py:3:1: error: layouts do not agree.\n  params: x\ntensorflow/dtensor/mlir/spmd_expander.cc:206 :: \nand more"
    line = str(errors.dtensor_layout_error(OpError(text)))
    assert line.startswith(
        "DTensor cannot compile the model in this layout. Received: layouts do not agree. Remove a rule"
    )
    assert errors.dtensor_layout_error(OpError("main.py: error: another\nof another engine")) is None


def test_a_tensor_from_outside_of_a_layer_is_told_in_one_line():
    text = "step got a regular tensor for input 7 (shape [1,1])\nbut was expecting a DTensor."
    line = str(errors.dtensor_layout_error(OpError(text)))
    assert line.startswith("On a mesh, a model must be called by tfdist.Trainer") and "input 7" in line


def test_one_line_keeps_columns():
    assert errors.one_line(" a  b \r\n\n  c ") == "a  b c"
