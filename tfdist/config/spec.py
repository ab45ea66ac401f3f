"""Parses compound values, `name(key=value, ...)`, and resolves names of user code, whose errors are reported in one line.

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

from tfdist.errors import InputError, TfdistError
from tfdist.errors.engine_errors import is_engine_error, one_line, out_of_memory
from tfdist.errors.formatting import nearest

_NAME = re.compile(r"[A-Za-z0-9_./-]*(:[A-Za-z0-9_.:/*?\[\]~@%+=-]*)?")  # after a colon, a path may follow
_QUOTED = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
_WORD = r"[A-Za-z_]\w*|\d[\d.]*\s*[A-Za-z]\w*"  # a name, or a number with its unit
_EMPTY = '""'
_GRAMMAR = 'The grammar is name or name(key=value, ...); a value is a Python literal: 0.9, True, None, "text", (1, 2).'
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Spec:
    """A name with keyword arguments.

    Attributes:
      name: letters, digits and `_ . : - /`; after a colon also `* ? [ ] ~ @ % + =`, as in paths.
      args: Python literals by parameter name, in the order in which they were written.
    """

    name: str
    args: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        """Returns a text that `parse` converts to an equal spec."""
        if not self.args:
            return self.name
        return f"{self.name}({', '.join(f'{key}={value!r}' for key, value in self.args.items())})"


def spec_of(value: Any) -> Spec:
    """Returns the spec of a dataclass with a `name`: its parameters that are not the defaults."""
    fields = (field for field in dataclasses.fields(value) if field.init)
    return Spec(value.name, {f.name: getattr(value, f.name) for f in fields if getattr(value, f.name) != f.default})


def parse(text: str, words: Iterable[str] = ()) -> Spec:
    """Parses `name` or `name(key=value, ...)`.

    Args:
      text: value of a flag; the arguments are Python literals.
      words: parameters whose values may be written without quotes, such as `mode=max` and `memory=2GiB`.

    Returns:
      The spec, such that `parse(str(spec)) == spec`.

    Raises:
      InputError: `text` does not follow the grammar; the message has the column, counted from 1.
    """
    text = _with_quotes(text.strip(), words)
    name = _NAME.match(text)
    if name is None or not name.group():
        _fail(text, 0, "expected a name")
    rest = text[name.end() :].lstrip()
    opening = len(text) - len(rest)
    if rest and rest[0] != "(":
        _fail(text, opening, 'expected "(" or the end')
    return Spec(name.group(), _arguments(text, opening) if rest else {})


def _with_quotes(text: str, words: Iterable[str]) -> str:
    """Returns the text with quotes around words that are values of these parameters."""
    names = "|".join(words)
    if not names:
        return text
    pattern = rf"{_QUOTED}|\b({names})(\s*=\s*)({_WORD})(?=\s*[,)])"
    return re.sub(pattern, lambda match: f"{match[1]}{match[2]}{match[3]!r}" if match[1] else match[0], text)


def _arguments(text: str, opening: int) -> dict[str, Any]:
    """Returns the arguments from the parenthesis at an index to the end of the text, which Python parses as a call."""
    source = f"f{text[opening:]}"

    def fail(line: int, column: int, problem: str) -> NoReturn:
        before = sum(len(each) for each in source.splitlines(keepends=True)[: line - 1])
        _fail(text, opening - 1 + before + column, problem)

    def fail_at(node: ast.expr | ast.keyword, problem: str) -> NoReturn:
        bytes_before = source.splitlines()[node.lineno - 1].encode()[: node.col_offset]
        fail(node.lineno, len(bytes_before.decode()), problem)

    try:
        tree = ast.parse(source, mode="eval")
    except SyntaxError as error:
        fail(error.lineno or 1, max((error.offset or 1) - 1, 0), error.msg)
    except (ValueError, MemoryError, RecursionError):
        fail(1, 1, "expected arguments that Python can parse")
    call = tree.body
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        fail(1, 1, 'expected the end after the first ")"')
    args: dict[str, Any] = {}
    for positional in call.args:
        fail_at(positional, "expected key=value, arguments are given by name")
    for keyword in call.keywords:
        if keyword.arg is None or keyword.arg in args:
            fail_at(keyword, f'"{keyword.arg}" is given twice' if keyword.arg else "expected key=value")
        try:
            # Only values whose repr is a literal, which excludes 1e999.
            args[keyword.arg] = ast.literal_eval(repr(ast.literal_eval(keyword.value)))
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            segment = ast.get_source_segment(source, keyword.value)
            quoted = f"; text is quoted: '{segment}'" if isinstance(keyword.value, ast.Name) else ""
            fail_at(keyword.value, f"expected a Python literal, not {segment}{quoted}")
    return args


def _fail(text: str, position: int, problem: str) -> NoReturn:
    """Raises an error that marks the position of a problem, an index into the text."""
    message = f"{text or _EMPTY}  -- column {position + 1}: {problem}{'' if problem.endswith('?') else '.'} {_GRAMMAR}"
    raise InputError(re.sub(r"\s", " ", message))  # one line, with unchanged columns


def load_object(name: str) -> Any:
    """Imports `package.module:attribute`; the current directory is searched first, as by `python -m`.

    Args:
      name: a module, a colon, and a name in the module, which may contain dots.

    Raises:
      InputError: the name has no colon, the module cannot be imported (the message has its error), or it has no such
        name.
    """
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
            f'"{name}" needs the module {module_name}, whose import failed: {_one_line(error)}. '
            f"The current directory {directory} and PYTHONPATH are searched."
        ) from error
    for part in attribute.split("."):
        if not hasattr(value, part):
            public = [known for known in dir(value) if not known.startswith("_")]
            raise InputError(f'"{name}" does not exist: there is no {part} in it.{nearest(part, public)}')
        value = getattr(value, part)
    return value


def call(function: Callable[..., Any], spec: Spec, **available: Any) -> Any:
    """Calls a function with the spec's arguments, and with those available arguments that its signature names.

    Args:
      function: the function that the spec names. Its errors are not caught.
      spec: its arguments take precedence over the available ones.
      **available: further arguments. They are not passed to a `**kwargs` parameter.

    Returns:
      The return value of the function.

    Raises:
      InputError: the spec has an argument that the function does not take, or lacks a required one, or the function has
        no signature, like some builtins.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        rule = f"{spec.name} must be a function with a signature that Python can inspect"
        raise InputError(f"{rule}. Received: {_one_line(error)}. Wrap it in a function.") from error
    accepts_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    unknown = [key for key in spec.args if key not in named]
    if unknown and not accepts_any:
        raise InputError(f'{spec.name} has no parameter "{unknown[0]}". Received: {spec}.{nearest(unknown[0], named)}')
    arguments = {key: value for key, value in available.items() if key in named} | spec.args
    missing = [name for name, p in named.items() if p.default is p.empty and name not in arguments]
    if missing:
        raise InputError(f"{spec.name} needs a value for {', '.join(missing)}. Received: {spec}. {_GRAMMAR}")
    try:
        return function(**arguments)
    except (TypeError, ValueError) as error:
        if not unknown or isinstance(error, InputError):
            raise
        raise InputError(  # an argument passed to `**kwargs` may be one that the function does not know
            f'{spec.name} may not have a parameter "{unknown[0]}". Received: {spec}, which failed with '
            f"{_one_line(error)}.{nearest(unknown[0], named)}"
        ) from error


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(". ")


def call_own(flag: str, function: Callable[..., Any], spec: Spec, **available: Any) -> Any:
    """Calls a user's function, or a Keras class, like `spec.call`.

    Args:
      flag: flag that names it, such as `--model`.
      function: the function that the spec names.
      spec: its arguments.
      **available: see `spec.call`.

    Raises:
      InputError: the function raised an error; the message has the error and the line. Out-of-memory and engine errors
        pass through.
    """
    try:
        return call(function, spec, **available)
    except Exception as error:
        if isinstance(error, TfdistError) or is_engine_error(error) or out_of_memory(error):
            raise
        raise InputError(
            f"{flag}={spec} must not fail. Received: {type(error).__name__}: {one_line(str(error)).rstrip('.')} "
            f"({_location(function, error)}). Fix the function or its arguments."
        ) from error


def _location(function: Callable[..., Any], error: BaseException) -> str:
    """Returns the last line of the function's own file in the traceback, or else the last line of the traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    try:
        file = inspect.getsourcefile(inspect.unwrap(function))
    except TypeError:  # a builtin, or a callable object
        file = None
    frame = next((frame for frame in reversed(frames) if frame.filename == file), frames[-1])
    return f"{frame.filename}, line {frame.lineno}"


def unique_names(entries: Iterable[tuple[str, T]], mark: str = "#") -> dict[str, T]:
    """Returns values by name, in order; duplicates get `mark` and a number, as in `dense/kernel#2`."""
    named: dict[str, T] = {}
    for original, value in entries:
        name, count = original, 1
        while name in named:
            count += 1
            name = f"{original}{mark}{count}"
        named[name] = value
    return named


def without_mark(name: str) -> str:
    """Returns the original name of a value of `unique_names`, as `dense/kernel` for `dense/kernel#2`."""
    return re.sub(r"#\d+$", "", name)
