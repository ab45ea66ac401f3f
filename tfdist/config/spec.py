"""Parses compound values, `name(key=value, ...)`, and resolves names of user code.

Used by flags such as `--optimizer="sgd(momentum=0.9)"` and `--model=package.module:function(width=64)`. Values are Python
literals, parsed by `ast.literal_eval`, so parsing a spec never executes code.
"""

import ast
import dataclasses
import importlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, TypeVar

from tfdist.errors import InputError, TfdistError, error_summary, is_engine_error, nearest, out_of_memory

_NAME = re.compile(r"[A-Za-z0-9_./-]*(:[A-Za-z0-9_.:/*?\[\]~@%+=-]*)?")  # after a colon, a path may follow
_QUOTED = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
_WORD = r"[A-Za-z_]\w*(?:\([^()]*\))?|\d[\d.]*\s*[A-Za-z]\w*"  # a name, a call of it, or a number with its unit
_EMPTY = '""'
_GRAMMAR = 'The grammar is name or name(key=value, ...); a value is a Python literal: 0.9, True, None, "text", (1, 2).'
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Spec:
    """A name with keyword arguments."""

    # Letters, digits and `_ . : - /`; after a colon also `* ? [ ] ~ @ % + =`, as in paths.
    name: str
    # Python literals by parameter name, in the order of the text.
    args: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        if not self.args:
            return self.name
        return f"{self.name}({', '.join(f'{key}={value!r}' for key, value in self.args.items())})"


def spec_of(value: Any) -> Spec:
    """Returns the spec of a dataclass with a `name`, without arguments that equal their defaults."""
    fields = (field for field in dataclasses.fields(value) if field.init)
    return Spec(value.name, {f.name: getattr(value, f.name) for f in fields if getattr(value, f.name) != f.default})


def parse(text: str, words: Iterable[str] = ()) -> Spec:
    """Parses `name` or `name(key=value, ...)`.

    Args:
      text: value of a flag; the arguments are Python literals.
      words: parameters whose values may be written without quotes, such as `mode=max` and `memory=2GiB`.

    Returns:
      The spec; `parse(str(spec))` is equal to it.

    Raises:
      InputError: `text` does not follow the grammar; the message contains the column, counted from 1.
    """
    text = _quote_words(re.sub(r"[\r\n]", " ", text.strip()), words)  # so that columns refer to one line
    name = _NAME.match(text)
    if name is None or not name.group():
        _fail(text, 0, "expected a name")
    remainder = text[name.end() :].lstrip()
    opening = len(text) - len(remainder)
    if remainder and remainder[0] != "(":
        _fail(text, opening, 'expected "(" or the end')
    return Spec(name.group(), _parse_arguments(text, opening) if remainder else {})


def _quote_words(text: str, words: Iterable[str]) -> str:
    names = "|".join(words)
    if not names:
        return text
    pattern = rf"{_QUOTED}|\b({names})(\s*=\s*)({_WORD})(?=\s*[,)])"
    return re.sub(pattern, lambda match: f"{match[1]}{match[2]}{match[3]!r}" if match[1] else match[0], text)


def _parse_arguments(text: str, opening: int) -> dict[str, Any]:
    """Parses the arguments from the opening parenthesis to the end of the text as a Python call."""
    source = f"f{text[opening:]}"

    def fail(column: int, problem: str) -> NoReturn:
        _fail(text, opening - 1 + column, problem)

    def fail_at(node: ast.expr | ast.keyword, problem: str) -> NoReturn:
        fail(len(source.encode()[: node.col_offset].decode()), problem)

    try:
        tree = ast.parse(source, mode="eval")
    except SyntaxError as error:
        fail(max((error.offset or 1) - 1, 0), error.msg)
    except (ValueError, MemoryError, RecursionError):
        fail(1, "expected arguments that Python can parse")
    call = tree.body
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        fail(1, 'expected the end after the first ")"')
    args: dict[str, Any] = {}
    for argument in call.args:
        fail_at(argument, "expected key=value, arguments are passed by name")
    for keyword in call.keywords:
        if keyword.arg is None or keyword.arg in args:
            fail_at(keyword, f'"{keyword.arg}" is specified twice' if keyword.arg else "expected key=value")
        try:
            # Only values whose repr is a literal, which excludes 1e999.
            args[keyword.arg] = ast.literal_eval(repr(ast.literal_eval(keyword.value)))
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            segment = ast.get_source_segment(source, keyword.value)
            remedy = f"; text is quoted: '{segment}'" if isinstance(keyword.value, ast.Name) else ""
            fail_at(keyword.value, f"expected a Python literal, not {segment}{remedy}")
    return args


def _fail(text: str, position: int, problem: str) -> NoReturn:
    message = f"{text or _EMPTY}  -- column {position + 1}: {problem}{'' if problem.endswith('?') else '.'} {_GRAMMAR}"
    raise InputError(re.sub(r"\s", " ", message))  # one line, with unchanged columns


def load_object(name: str) -> Any:
    """Imports `package.module:attribute`, or raises `InputError`; searches the current directory first, like `python -m`."""
    module_name, _, attribute = name.partition(":")
    if module_name.endswith(".py"):
        module = module_name.removesuffix(".py").strip("./").replace("/", ".")
        raise InputError(
            f'A user\'s own object must be named package.module:name, without ".py". Received: "{name}". '
            f"Write {module}:{attribute}."
        )
    if not all(part.isidentifier() for part in [*module_name.split("."), *attribute.split(".")]):
        raise InputError(f'A user\'s own object must be named package.module:name. Received: "{name}".')
    directory = os.getcwd()
    if directory not in sys.path and "" not in sys.path and not sys.flags.safe_path:
        sys.path.insert(0, directory)
    try:
        value = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise InputError(
            f'"{name}" needs the module {module_name}, whose import failed: {error_summary(error)}. '
            f"The current directory {directory} and PYTHONPATH are searched."
        ) from error
    for part in attribute.split("."):
        if not hasattr(value, part):
            names = [public_name for public_name in dir(value) if not public_name.startswith("_")]
            raise InputError(f'"{name}" does not exist: there is no {part} in it.{nearest(part, names)}')
        value = getattr(value, part)
    return value


def call(function: Callable[..., Any], spec: Spec, **available_arguments: Any) -> Any:
    """Calls a function with the spec's arguments, and with the available arguments that its signature contains.

    The spec's arguments take precedence. Available arguments are not passed to a `**kwargs` parameter. Errors that the
    function raises are not caught.

    Raises:
      InputError: the spec has an unknown argument or lacks a required one, or the function has no signature, like some
        builtins.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        rule = f"{spec.name} must be a function with a signature that Python can inspect"
        raise InputError(f"{rule}. Received: {error_summary(error)}. Wrap it in a function.") from error
    accepts_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    parameters_by_name = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    unknown_keys = [key for key in spec.args if key not in parameters_by_name]
    if unknown_keys and not accepts_any:
        raise InputError(
            f'{spec.name} has no parameter "{unknown_keys[0]}". Received: {spec}.{nearest(unknown_keys[0], parameters_by_name)}'
        )
    arguments = {key: value for key, value in available_arguments.items() if key in parameters_by_name} | spec.args
    missing = [name for name, p in parameters_by_name.items() if p.default is p.empty and name not in arguments]
    if missing:
        raise InputError(f"{spec.name} needs a value for {', '.join(missing)}. Received: {spec}. {_GRAMMAR}")
    try:
        return function(**arguments)
    except (TypeError, ValueError) as error:
        if not unknown_keys or isinstance(error, InputError):
            raise
        raise InputError(  # the function may not support an argument passed to `**kwargs`
            f'{spec.name} may not have a parameter "{unknown_keys[0]}". Received: {spec}, which failed with '
            f"{error_summary(error)}.{nearest(unknown_keys[0], parameters_by_name)}"
        ) from error


def call_user_function(flag: str, function: Callable[..., Any], spec: Spec, **available_arguments: Any) -> Any:
    """Calls a user's function, or a Keras class, that is named by a flag such as `--model`; see `call`.

    Raises:
      InputError: the function raised an error; the message contains the error and its line. Out-of-memory errors and
        errors of the engine are not converted.
    """
    try:
        return call(function, spec, **available_arguments)
    except Exception as error:
        if isinstance(error, TfdistError) or is_engine_error(error) or out_of_memory(error):
            raise
        raise InputError(
            f"{flag}={spec} must not fail. Received: {error_summary(error)} "
            f"({_location(function, error)}). Fix the function or its arguments."
        ) from error


def _location(function: Callable[..., Any], error: BaseException) -> str:
    """Returns the innermost line of the traceback in the function's file, or else its last line."""
    frames = traceback.extract_tb(error.__traceback__)
    try:
        file = inspect.getsourcefile(inspect.unwrap(function))
    except TypeError:  # a builtin, or a callable object
        file = None
    frame = next((frame for frame in reversed(frames) if frame.filename == file), frames[-1])
    return f"{frame.filename}, line {frame.lineno}"


def unique_names(entries: Iterable[tuple[str, T]], mark: str = "#") -> dict[str, T]:
    """Returns values by name, in order; duplicates get `mark` and a number, as in `dense/kernel#2`."""
    values: dict[str, T] = {}
    for original, value in entries:
        name, count = original, 1
        while name in values:
            count += 1
            name = f"{original}{mark}{count}"
        values[name] = value
    return values


def remove_mark(name: str) -> str:
    """Removes the mark of `unique_names`: `dense/kernel#2` becomes `dense/kernel`."""
    return re.sub(r"#\d+$", "", name)
