"""Interprets exceptions of TensorFlow and Horovod by their class names, without importing an engine."""

import math
import re
from collections.abc import Callable, Sequence

from tfdist.errors import InputError, OutOfMemoryError
from tfdist.errors.formatting import byte_size

_ENGINE_ERRORS = frozenset(
    ("UnavailableError", "AbortedError", "InternalError", "CancelledError", "DeadlineExceededError")
    + ("HorovodInternalError",)
)
_TENSOR = re.compile(r"shape ?\[([\d,]*)\] and type (\w+)")
_BYTES = re.compile(r"(\d+) ?bytes")
_FORMATTED_SIZE = re.compile(r"allocate ([\d.]+ ?[KMGTPE]i?B)")
_ITEM_BYTES = {
    "half": 2,
    "bfloat16": 2,
    "float": 4,
    "double": 8,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
    "int8": 1,
    "bool": 1,
}
_OPERATION = re.compile(r"see current operation: [^\n]*?\"tf\.(\w+)\"")  # in DTensor's messages
_UNSUPPORTED_OPERATION = re.compile(r"'tf\.(\w+)' op does not implement layout propagation")
_INPUT_ERROR = re.compile(r"\bInputError: (.*)\nTraceback")
_SUMMARY_LINE = re.compile(r"root error|successful operations|derived errors|^\[\[|^$")  # lines without a cause
_NODE = re.compile(r"\{\{\w+ \S+\}\} ?")  # the name of an operation or function in a graph
_MAX_CAUSE_LENGTH = 300


def is_engine_error(error: BaseException) -> bool:
    """Returns whether the error was raised by an engine for an external reason, such as a lost peer."""
    return not _ENGINE_ERRORS.isdisjoint(_class_names(error))


def out_of_memory(error: BaseException) -> OutOfMemoryError | None:
    """Returns a one-line error about a failed allocation, or None for any other error.

    Args:
      error: an exception; its notes (`BaseException.add_note`), such as the step, are included in the message.
    """
    allocation_error = _allocation_error(error)
    if allocation_error is None:
        return None
    notes = ", ".join(getattr(error, "__notes__", ()))
    text = _NODE.sub("", one_line(str(allocation_error)))
    size = _requested_size(text)
    cause = f"{type(allocation_error).__name__}: {text}"
    out_of_memory_error = OutOfMemoryError(
        f"Out of memory{f' ({notes})' if notes else ''}{f': tried to allocate {size}' if size else ''}. Lower "
        "--batch_size, or spread it over more --devices. "
        f"{truncate(cause)}"
    )
    out_of_memory_error.__cause__ = error
    return out_of_memory_error


def dtensor_layout_error(
    error: BaseException, operations: Callable[[str], Sequence[str]] = lambda kind: ()
) -> InputError | None:
    """Returns a one-line error about a model that DTensor cannot compile in its layout, or None for any other error.

    Args:
      error: an exception.
      operations: returns the names of all operations of a type; if there is only one, the message contains its name.
    """
    text = str(error)
    if "was expecting a DTensor" in text:
        return InputError(
            "On a mesh, a model must be called by tfdist.Trainer, which places its tensors on all devices. Received: "
            f"{one_line(text)[:_MAX_CAUSE_LENGTH]}. Call the trainer's methods, or make the tensor a non-trainable weight."
        )
    if "tensorflow/dtensor/" not in text:
        return None
    [cause, *_] = text.rpartition(" error: ")[2].strip().splitlines()
    cause = cause.partition(" Please file")[0][:_MAX_CAUSE_LENGTH].strip().rstrip(".")
    match = _OPERATION.search(text)
    names = operations(match[1]) if match else ()
    location = f" ({names[0]})" if len(names) == 1 else ""
    unsupported_match = _UNSUPPORTED_OPERATION.search(cause)
    if unsupported_match:
        operation = unsupported_match[1]
        return InputError(
            f"On a mesh, a model must consist of operations that DTensor supports. Received: tf.{operation}{location}, which "
            "has no layouts. Compute it in the data (Dataset.map, --augment), or rewrite it with other operations "
            "(docs/guides/meshes.md, Limitations of DTensor)."
        )
    return InputError(
        f"DTensor cannot compile the model in this layout. Received: {cause}{location}. Leave out a rule of --layout, "
        "constrain the tensors before the operation with tfdist.constrain, or rewrite the operation (docs/guides/meshes.md, "
        "Limitations of DTensor)."
    )


def nested_input_error(error: BaseException) -> InputError | None:
    """Returns the `InputError` raised in Python code called by a TensorFlow operation, or None if there is none."""
    match = _INPUT_ERROR.search(str(error))
    return InputError(match[1]) if match else None


def error_summary(error: BaseException) -> str:
    """Returns the type and the cause of an error in one line, without a full stop."""
    text = cause(error)
    return f"{type(error).__name__}: {truncate(text)}" if text else type(error).__name__


def cause(error: BaseException) -> str:
    """Returns an error's message in one line; for errors raised by a TensorFlow graph, only the line with the cause."""
    try:
        text = str(error)
    except Exception:
        return "<exception str() failed>"  # as in a traceback
    if "OpError" not in _class_names(error):
        return _NODE.sub("", one_line(text)).rstrip(".")
    lines = [line for line in map(str.strip, text.splitlines()) if not _SUMMARY_LINE.search(line)]
    root_causes = [line.split(":", 1)[-1].strip() for line in lines if line.startswith("(0)")]
    return _NODE.sub("", (root_causes or lines[-1:] or [one_line(text)])[0]).partition(" [Op:")[0].rstrip(".")


def truncate(text: str) -> str:
    """Returns a text, truncated if it is too long for a message."""
    return text if len(text) <= _MAX_CAUSE_LENGTH else f"{text[:_MAX_CAUSE_LENGTH]}..."


def one_line(text: str) -> str:
    """Returns the text with its lines joined, without terminal colors, and with other control characters escaped."""
    return escape_control_characters(re.sub(r"\s*[\r\n\t]\s*", " ", re.sub(r"\x1b\[[0-9;]*m", "", text).strip()))


def escape_control_characters(text: str) -> str:
    """Escapes control characters, which could alter a terminal."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _allocation_error(error: BaseException | None) -> BaseException | None:
    """Returns the out-of-memory error in the chain of causes, or None; Keras wraps errors that occur in `build`."""
    seen_ids: set[int] = set()  # of `raise error from error`
    while error is not None and id(error) not in seen_ids:
        if isinstance(error, MemoryError) or "ResourceExhaustedError" in _class_names(error):
            return error
        seen_ids.add(id(error))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None


def _class_names(error: BaseException) -> set[str]:
    return {kind.__name__ for kind in type(error).__mro__}


def _requested_size(text: str) -> str:
    if match := _FORMATTED_SIZE.search(text):
        return match[1]
    if (match := _TENSOR.search(text)) and match[2] in _ITEM_BYTES:
        return byte_size(math.prod(int(dim) for dim in match[1].split(",") if dim) * _ITEM_BYTES[match[2]])
    match = _BYTES.search(text)
    return byte_size(int(match[1])) if match else ""
