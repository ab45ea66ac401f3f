"""Which modules of the tree import which, read from their text: nothing is imported."""

import ast
import functools
import pathlib
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parents[1]
SINGLE_FILES = {"errors", "models", "testing"}  # in tfdist/, each in place of a package; other files there are commands
_TENSORFLOW = {"tensorflow", "keras", "horovod", "tensorflow_datasets"}  # importing one of them imports TensorFlow


def imports_tensorflow(path: pathlib.Path) -> bool:
    """Returns whether importing a file of tests, and the conftest.py files that apply to it, imports TensorFlow."""
    tests = ROOT / "tests"
    fixtures = (folder / "conftest.py" for folder in path.parents if folder.is_relative_to(tests))
    return any(_TENSORFLOW & _reachable(file) for file in (path, *fixtures) if file.exists())


def package_of(path: pathlib.PurePath) -> str:
    """Returns the package that a file of the library or of its tests belongs to: `step` for `tfdist/step/` and `tests/step/`.

    What is in no package, such as the commands and `tests/end_to_end/`, is called "commands".

    Args:
      path: relative to the root of the tree.
    """
    if path.parts[0] == "strategies" or path.parts[:2] == ("tests", "strategies"):
        return "strategies"
    name = path.parts[1].removesuffix(".py")
    return name if name in SINGLE_FILES or (ROOT / "tfdist" / name).is_dir() else "commands"


@functools.cache
def _reachable(path: pathlib.Path) -> frozenset[str]:
    """Returns the top-level names that are imported when a file is imported, directly or by other files of the tree."""
    names: set[str] = set()
    files, remaining = {path}, [path]
    while remaining:
        for name in _imports(remaining.pop()):
            names.add(name.partition(".")[0])
            new = _files(name) - files
            files |= new
            remaining += new
    return frozenset(names)


@functools.cache
def _imports(path: pathlib.Path) -> frozenset[str]:
    """Returns the modules and names that a file imports outside of functions or passes to `importorskip`."""
    return frozenset(_named(ast.parse(path.read_text(encoding="utf-8"))))


def _named(node: ast.AST) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                yield from (name for decorator in getattr(child, "decorator_list", []) for name in _named(decorator))
                continue
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                continue
            case ast.Import():
                yield from (alias.name for alias in child.names)
            case ast.ImportFrom(module=str(module)):
                yield from (f"{module}.{alias.name}" for alias in child.names)
            case ast.Call(func=ast.Attribute(attr="importorskip"), args=[ast.Constant(value=str(name)), *_]):
                yield name
        yield from _named(child)


@functools.cache
def _files(name: str) -> frozenset[pathlib.Path]:
    """Returns the files of the tree that are executed when `name` is imported: a module and its parents."""
    parts = name.split(".")
    if parts[:2] == ["tfdist", "strategies"]:
        parts = parts[1:]
    if parts[0] not in ("tfdist", "strategies", "tests"):
        return frozenset()
    files = []
    for length in range(1, len(parts) + 1):
        place = ROOT.joinpath(*parts[:length])
        files += [place / "__init__.py", place.with_suffix(".py")]
    return frozenset(file for file in files if file.is_file())
