"""Defines the errors of tfdist and their exit codes, formats parts of messages, and interprets the exceptions of engines.

Every error that a user can cause is one of these classes: a command prints its message as one line and exits with its code.
Messages are written with flags; public functions of the library translate them into arguments. Exceptions of TensorFlow and
Horovod are interpreted by their class names, without importing an engine.
"""

import contextlib
import contextvars
import difflib
import enum
import functools
import math
import numbers
import re
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ParamSpec, TypeGuard, TypeVar

__all__ = [
    "CheckpointError",
    "CorruptCheckpointError",
    "DesyncError",
    "ExitCode",
    "InputError",
    "Interrupted",
    "NotFiniteError",
    "OutOfMemoryError",
    "PeerLostError",
    "Preempted",
    "SpawnError",
    "TfdistError",
    "TrialError",
    "WriteError",
    "describe_error",
    "names_arguments",
    "naming_flags",
]

SIGNAL_OFFSET = 128  # as in a shell: 128 + number of the signal that ended the process
P = ParamSpec("P")
R = TypeVar("R")
_FLAG = re.compile(r"(?<![\w-])--(?=[a-z])")
_in_command = contextvars.ContextVar("in_command", default=False)


class ExitCode(enum.IntEnum):
    """Exit code of a tfdist process, with the same meaning for every command and every rank."""

    DONE = 0
    FAILED = 1  # an unexpected error, or `verify` found a difference
    BAD_INPUT = 2
    NOT_FINITE = 3  # the loss became inf or NaN
    STALLED = 4
    PEER_LOST = 5
    OUT_OF_MEMORY = 6
    PREEMPTED = 75  # EX_TEMPFAIL: the run should be restarted


MEANINGS = {code: code.name.lower().replace("_", " ") for code in ExitCode}
MEANINGS |= {ExitCode.NOT_FINITE: "loss not finite", ExitCode.PEER_LOST: "a peer was lost"}


def is_external_failure(code: int) -> bool:
    """Returns whether a process failed for an external reason: a signal, lack of memory, or a lost peer."""
    return code > SIGNAL_OFFSET or code in (ExitCode.PEER_LOST, ExitCode.OUT_OF_MEMORY)


def describe_code(code: int) -> str:
    """Describes an exit code: `code 3 (loss not finite)`, `code 137 (killed by SIGKILL)`, or `code 42`."""
    if code > SIGNAL_OFFSET and code - SIGNAL_OFFSET in signal.valid_signals():
        return f"code {code} (killed by {signal.Signals(code - SIGNAL_OFFSET).name})"
    meaning = MEANINGS.get(code)  # type: ignore[call-overload]  # an IntEnum equals its number
    return f"code {code} ({meaning})" if meaning else f"code {code}"


class TfdistError(Exception):
    """An error with a one-line message for the user."""

    exit_code = ExitCode.FAILED


class InputError(TfdistError, ValueError):
    """A flag, environment variable, file or argument is invalid. The message states the rule, the value and the remedy."""

    exit_code = ExitCode.BAD_INPUT


class NotFiniteError(TfdistError):
    """The loss of a step is inf or NaN."""

    exit_code = ExitCode.NOT_FINITE


class PeerLostError(TfdistError):
    """Another rank of the job failed, did not join, or did not answer in time."""

    exit_code = ExitCode.PEER_LOST


class OutOfMemoryError(TfdistError):
    """The engine could not allocate memory."""

    exit_code = ExitCode.OUT_OF_MEMORY


class CheckpointError(TfdistError):
    """A checkpoint could not be written or read; existing ones are unchanged."""


class WriteError(TfdistError):
    """An output file of a run could not be written, for example because the disk is full."""


class CorruptCheckpointError(CheckpointError):
    """A checkpoint is corrupted.

    Attributes:
      path: path of the checkpoint, or of the corrupted file in it.
      problem: short description.
    """

    def __init__(self, path: object, problem: str):
        problem = " ".join(problem.split())[:300]  # a message from a corrupted file may have any length
        super().__init__(
            f"A checkpoint must be undamaged. Received: {path}: {problem}. Resume from another one, or restore this "
            "one from a copy."
        )
        self.path = path
        self.problem = problem


class DesyncError(TfdistError):
    """Replicas that must have the same values have different ones."""


class SpawnError(TfdistError):
    """A process of `tfdist.spawn` ended without a result.

    Attributes:
      rank: rank of the process; None if no process failed on its own.
      code: its exit code, 128 + N if signal N ended it.
    """

    def __init__(self, message: str, rank: int | None, code: int):
        super().__init__(message)
        self.rank, self.code = rank, code


class TrialError(TfdistError):
    """A trial of a search failed for a reason that is unrelated to the searched value.

    Attributes:
      exit_code: exit code of the process that failed.
    """

    def __init__(self, message: str, code: int):
        super().__init__(message)
        self.exit_code = code  # type: ignore[assignment]  # may be that of any program


class Preempted(TfdistError):
    """All ranks stopped at the same step on request, and saved a checkpoint. The run should be restarted."""

    exit_code = ExitCode.PREEMPTED


class Interrupted(Preempted):
    """Like `Preempted`, but requested by Ctrl-C; a command exits with code 130, as in a shell."""


def describe_error(error: BaseException) -> str:
    """Returns the kind of an error, not its message: `loss not finite`, `interrupted`, or `failed`."""
    if isinstance(error, KeyboardInterrupt | Interrupted):
        return "interrupted"
    return MEANINGS[error.exit_code if isinstance(error, TfdistError) else ExitCode.FAILED]


# Errors of the library name arguments (`batch_size=7`), and errors of commands name flags (`--batch_size=7`).
# Messages are written with flags; public functions of the library translate them.


@contextlib.contextmanager
def naming_flags(uses_flags: bool = True) -> Iterator[None]:
    """Makes errors name flags, as in a command, or else arguments, as in a user's program that a command runs."""
    token = _in_command.set(uses_flags)
    try:
        yield
    finally:
        _in_command.reset(token)


def names_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a public function of the library so that its errors name arguments, unless a command calls it."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except TfdistError as error:
            if error.args and isinstance(error.args[0], str):
                error.args = (with_argument_names(error.args[0]), *error.args[1:])
            raise

    return call


def with_argument_names(message: str) -> str:
    """Replaces flags in a message with arguments, except in a command. Quoted commands keep their flags."""
    if _in_command.get():
        return message
    parts = message.split("`")
    return "`".join(part if index % 2 else _FLAG.sub("", part) for index, part in enumerate(parts))


def count_of(number: int, name: str) -> str:
    """Returns a number with the singular or the plural of a name: `1 replica`, `8 micro-batches`, `1,200 steps`."""
    plural = "es" if name.endswith(("batch", "process")) else "s"
    return f"{number:,} {name}{'' if number == 1 else plural}"


def byte_size(count: float) -> str:
    """Formats a number of bytes with a suitable unit: `512 bytes`, `38.1 MiB`."""
    if count < 1024:
        return f"{count:.0f} bytes"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if count < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} TiB"


def is_integer(value: Any) -> TypeGuard[int]:
    """Returns whether a value is an integer, such as 3 or `numpy.int64(3)`."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_number(value: Any) -> TypeGuard[float]:
    """Returns whether a value is a real number, such as 3, 0.5 or `numpy.float32(0.5)`."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def as_python(value: Any) -> Any:
    """Converts a number to Python's int or float, which both files and TensorFlow constants accept."""
    return int(value) if is_integer(value) else float(value)


def nearest(word: str, known_names: Iterable[str]) -> str:
    """Returns the end of a message about an unknown name, such as ` Did you mean "mirrored"? Known: mirrored, single.`."""
    names = sorted(known_names)
    return f"{did_you_mean(word, names)} Known: {', '.join(names) or 'none'}."


def did_you_mean(word: str, known_names: Iterable[str], form: str = "{}") -> str:
    """Returns only the question, such as ` Did you mean "mirrored"?`, or "" if no name is similar to the unknown word.

    `form` is the format of a suggested name, with `{}` for the name.
    """
    by_lower = {name.lower(): name for name in known_names}
    matches = difflib.get_close_matches(word.lower(), by_lower)
    if not matches and len(word) > 1:  # such as f1 for f1_score
        matches = [name for name in by_lower if name.startswith(word.lower())][:3]
    suggestions = " or ".join(f'"{form.format(by_lower[name])}"' for name in matches)
    return f" Did you mean {suggestions}?" if matches else ""


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
    """Returns a one-line error about a failed allocation, with the notes of `error`, or None for any other error."""
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

    `operations` returns the names of all operations of a type; if there is only one, the message contains its name.
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
            "has no layouts. Compute it in the input pipeline (Dataset.map, --augment), or rewrite it with other operations "
            "(docs/guides/meshes.md, Limitations of DTensor)."
        )
    return InputError(
        f"DTensor cannot compile the model in this layout. Received: {cause}{location}. Remove a rule from --layout, "
        "constrain the tensors before the operation with tfdist.constrain, or rewrite the operation (docs/guides/meshes.md, "
        "Limitations of DTensor)."
    )


def nested_input_error(error: BaseException) -> InputError | None:
    """Returns the `InputError` raised in Python code called by a TensorFlow operation, or None for any other error."""
    match = _INPUT_ERROR.search(str(error))
    return InputError(match[1]) if match else None


def error_summary(error: BaseException) -> str:
    """Returns the type and the cause of an error in one line, without a full stop."""
    text = error_cause(error)
    return f"{type(error).__name__}: {truncate(text)}" if text else type(error).__name__


def error_cause(error: BaseException) -> str:
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
