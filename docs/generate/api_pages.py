"""A page of the API reference for each public package: what its `__all__` names, by mkdocstrings."""

import ast
import dataclasses
import inspect
import pathlib
from collections.abc import Iterator
from typing import Any

import flag_pages

import tfdist
from tfdist.config.job_config import RunConfig
from tfdist.config.strategy_registry import JobOptions, TrainerOptions

_FOLDER = pathlib.Path(tfdist.__file__).parent
# What programs import, and what plug-ins extend.
PACKAGES = (
    "collectives",
    "data",
    "errors",
    "gradients",
    "horovod",
    "layers",
    "models",
    "optimizers",
    "reporting",
    "row_semantics",
    "storage",
    "testing",
)


def public_names(package: str) -> list[str]:
    """Returns `__all__` of a package, which is parsed and not imported."""
    for node in _package_tree(package).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    raise ValueError(f"{package} must have an __all__ for the API reference.")


def pages() -> Iterator[tuple[str, str]]:
    """Yields path in the site and Markdown of each page."""
    yield "reference/api/tfdist.md", _page("tfdist")
    for name in PACKAGES:
        yield f"reference/api/{name}.md", _page(f"tfdist.{name}")


def _page(package: str) -> str:
    names = sorted(public_names(package), key=lambda name: (name[:1].islower(), name.lower()))
    about = inspect.cleandoc(ast.get_docstring(_package_tree(package)) or "")
    return "\n".join([f"# {package}\n", about, "", *(_entry(package, name) for name in names)])


def _entry(package: str, name: str) -> str:
    path = f"{package}.{name}"
    if package == "tfdist" and name in PACKAGES:
        return f"## {path} {{ #{path} data-toc-label='{name}' }}\n\nA package: [{path}]({name}.md).\n"
    definition = _definition(package, name)
    if definition is None:
        return f"## {path} {{ #{path} data-toc-label='{name}' }}\n\nAs in Horovod, if it is installed.\n"
    anchor = f'<a id="{path}"></a>\n\n'
    return f"{anchor}::: {definition}\n    options:\n      heading: {path}\n      toc_label: {name}\n{_options(path)}"


def _definition(module: str, name: str) -> str | None:
    """Returns the path of the code that defines a name of a module; None if it is made at run time."""
    if module == "tfdist" and name in tfdist._MODULES:
        return _definition(tfdist._MODULES[name], name)
    if (tree := _tree(module)) is None:
        return None
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name and node.module:
                    whole = f"{node.module}.{alias.name}"
                    return whole if _tree(whole) and node.module == module else _definition(node.module, alias.name)
        elif name in _defined(node):
            return f"{module}.{name}"
    return None


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _options(path: str) -> str:
    """Returns the keyword options of a function that takes fields of a configuration, as links to the flags."""
    configs = {"tfdist.load_strategy": (JobOptions, TrainerOptions), "tfdist.distribute": (RunConfig,)}
    fields: list[dataclasses.Field[Any]] = [
        one for config in configs.get(path, ()) for one in dataclasses.fields(config)
    ]
    if path == "tfdist.load_strategy":
        fields = [field for field in fields if field.metadata["flag"].is_option]
    names = [f"[`{name}`](../{flag_pages.link(name)})" for name in sorted({field.name for field in fields})]
    return f"\nOptions, with the meaning of the flags: {', '.join(names)}.\n" if names else ""


def _package_tree(package: str) -> ast.Module:
    tree = _tree(package)
    assert tree is not None, package
    return tree


def _tree(module: str) -> ast.Module | None:
    place = _FOLDER.joinpath(*module.split(".")[1:])
    path = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    is_ours = module.partition(".")[0] == "tfdist" and path.exists()
    return ast.parse(path.read_text(encoding="utf-8")) if is_ours else None
