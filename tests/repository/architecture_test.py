"""Imports point one way, and other rules of the source tree. Everything is parsed, and nothing imported."""

import ast
import graphlib
import json
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator

from tests.import_graph import SINGLE_FILES

ROOT = pathlib.Path(__file__).parents[2]

# A package imports only itself and packages before it. The commands, which are the other modules in tfdist/, may import any.
PACKAGES = (
    "errors storage keras_internals cluster config coordination reporting collectives row_semantics data"
    " distribution gradients parameter_server layers pipelining models optimizers step synchronization checkpoint"
    " trainer keras_fit horovod launcher planning testing cli"
).split()
STRATEGIES = "strategies"  # plugins, which import packages up to this one:
BELOW_STRATEGIES = "pipelining"
OF_TESTS = {"conformance", "documents", "end_to_end", "programs", "repository", "traps", "workers"}  # mirror no package

CODE = [path for folder in ("tfdist", "strategies") for path in sorted((ROOT / folder).rglob("*.py"))]
NOT_OURS = re.compile(r"\.(?!ci$)|(runs|build|dist|site|venv|__pycache__)$|.*\.egg-info$")


def module_name(path: pathlib.Path) -> str:
    """Returns the module name under which a file is installed."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = ("tfdist", *parts) if parts[0] == "strategies" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in CODE}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}


def imports(name: str) -> Iterator[tuple[str, str]]:
    """Yields every import in a module, at any level: the imported module, and the imported name or ""."""
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, (
                f"{name}:{node.lineno}: imports are absolute, as strategies/ has another place in the tree"
            )
            assert node.module
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield (submodule, "") if submodule in MODULES else (node.module, alias.name)


def own_imports(name: str) -> set[str]:
    return {module for module, _ in imports(name) if module.partition(".")[0] == "tfdist"}


def runs_when_started(name: str) -> bool:
    guards = (node for node in TREES[name].body if isinstance(node, ast.If))
    return any(ast.unparse(guard.test) == "__name__ == '__main__'" for guard in guards)


def place(name: str) -> int:
    """Returns the position of a module in the order of imports."""
    package = (*name.split("."), "")[1]
    if package == STRATEGIES:
        return PACKAGES.index(BELOW_STRATEGIES)
    return PACKAGES.index(package) if package in PACKAGES else len(PACKAGES)


def files() -> Iterator[pathlib.Path]:
    """Returns all files of the project, whether committed or not."""
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [name for name in folders if not NOT_OURS.match(name)]
        yield from (pathlib.Path(folder) / name for name in names)


def python_files() -> list[pathlib.Path]:
    return [path for path in files() if path.suffix == ".py"]


def test_tfdist_has_commands_and_packages_and_nothing_else():
    folders = {path.name for path in (ROOT / "tfdist").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == set(PACKAGES) - SINGLE_FILES
    loose = [name for name in MODULES if name.count(".") == 1 and MODULES[name].name != "__init__.py"]
    assert {name for name in loose if not runs_when_started(name)} == {f"tfdist.{name}" for name in SINGLE_FILES}


def test_every_package_says_what_lives_there():
    for package in PACKAGES:
        text = ast.get_docstring(TREES[f"tfdist.{package}"])
        assert text and len(text) > 80, package


def test_contributing_shows_the_same_order():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    picture = re.search(r"## Architecture.*?```text\n(.*?)```", text, re.DOTALL)
    assert picture and [line.split()[0] for line in picture[1].splitlines()] == PACKAGES


def test_tests_mirror_the_packages():
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders <= {*PACKAGES, STRATEGIES, *OF_TESTS}


def test_imports_point_one_way_and_the_engine_loads_a_strategy_by_its_name():
    wrong = [
        f"{name} imports {imported}"
        for name in MODULES
        for imported in own_imports(name)
        if imported != "tfdist" and (place(imported) > place(name) or imported.startswith("tfdist.strategies"))
    ]
    assert not wrong, "\n".join(wrong)


def bound_names(node: ast.AST) -> set[str]:
    """Returns the names that a module binds, outside of its functions and classes."""
    found = set()
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            found.add(child.name)
            continue
        if isinstance(child, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).partition(".")[0] for alias in child.names}
        elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            found.add(child.id)
        found |= bound_names(child)
    return found


def test_imports_of_tests_and_programs_exist_also_inside_functions():
    wrong = []
    names = {name: bound for name, tree in TREES.items() if "__getattr__" not in (bound := bound_names(tree))}
    for path in set(python_files()) - set(CODE):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module in names:
                missing = [a.name for a in node.names if a.name not in names[node.module]]
                missing = [name for name in missing if f"{node.module}.{name}" not in MODULES]
                wrong += [f"{path.relative_to(ROOT)}:{node.lineno}: {node.module}.{name}" for name in missing]
    assert not wrong, "\n".join(wrong)


def test_imports_have_no_cycle():
    graph = {name: own_imports(name) - {name} for name in MODULES}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError with the cycle


def classes_asked_for(tree: ast.AST) -> set[str]:
    """Returns the names of the classes with which code compares the classes of objects."""
    nodes = list(ast.walk(tree))
    asked = [
        n.args[1] for n in nodes if isinstance(n, ast.Call) and ast.unparse(n.func) in ("isinstance", "issubclass")
    ]
    asked += [n.comparators[0] for n in nodes if isinstance(n, ast.Compare) and ast.unparse(n.left).startswith("type(")]
    return {n.id for classes in asked for n in ast.walk(classes) if isinstance(n, ast.Name)}


def test_strategies_answer_questions_instead_of_being_asked_for_their_class():
    classes = [node for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    kinds = {"Strategy", "TensorLayouts", "ModelParts", "VariableBlocks", "VariableAdoption"}
    for _ in range(3):  # subclasses of subclasses
        kinds |= {node.name for node in classes if kinds & {ast.unparse(base) for base in node.bases}}
    others = [name for name in MODULES if not name.startswith(("tfdist.pipelining.", "tfdist.strategies."))]
    asked = {name: classes_asked_for(TREES[name]) & (kinds - {"Strategy"}) for name in others}
    assert "HasStages" in kinds and not {name: found for name, found in asked.items() if found}


def test_strategies_import_the_engines_public_names_only():
    strategies = [name for name in MODULES if name.startswith("tfdist.strategies.")]
    assert strategies
    wrong = [
        f"{name} imports {imported} {attribute}"
        for name in strategies
        for imported, attribute in imports(name)
        if imported.startswith("absl")
        or (imported.startswith("tfdist") and any(p.startswith("_") for p in (*imported.split("."), attribute)))
    ]
    assert not wrong, "\n".join(wrong)


def test_only_commands_and_their_flags_import_absl():
    own = ("tfdist.cli.command", "tfdist.cli.flags")
    users = [name for name in MODULES if any(module.split(".")[0] == "absl" for module, _ in imports(name))]
    assert not [name for name in users if not (name in own or runs_when_started(name))]


def test_private_corners_are_touched_in_one_place():
    corner = re.compile(r"(keras\.src|tensorflow\.python|tf\.python|tf\.__internal__)\b")
    wrong = []
    for name, tree in TREES.items():
        docstrings = {ast.get_docstring(node, clean=False) for node in ast.walk(tree) if isinstance(node, _DOCUMENTED)}
        used = [f"{module}.{attribute}" for module, attribute in imports(name)]
        used += [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
        used += [
            str(node.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and node.value not in docstrings
        ]
        if not name.startswith("tfdist.keras_internals"):
            wrong += [f"{name}: {text}" for text in used if corner.match(text)]
    assert not wrong, "\n".join(wrong)


# Quoted names of strategies that mean something else.
OTHER_MEANINGS = {
    "tfdist.__main__": {"horovod"},  # the Python package
    "tfdist.bench": {"tpu"},  # the flag --tpu
    "tfdist.horovod.process": {"horovod"},  # the Python package
    "tfdist.install_horovod": {"horovod"},
    "tfdist.cli.layout_reports": {"mesh"},  # a key of its JSON
    "tfdist.layout": {"mesh"},
    "tfdist.cli.doctor_engines": {"horovod"},
    "tfdist.cli.doctor_machine": {"horovod"},
    "tfdist.reporting.environment": {"horovod"},
    "tfdist.step.validation": {"horovod"},
    "tfdist.launcher.engine_environment": {"horovod"},  # a value of --launcher
}
REGISTRY = "tfdist.config.strategy_registry"


def quoted_strategies(name: str) -> set[str]:
    """Returns the names of strategies that occur as strings in a module."""
    constants = {node.value for node in ast.walk(TREES[name]) if isinstance(node, ast.Constant)}
    return constants & {path.stem for path in (ROOT / "strategies").glob("*.py")} - {"__init__"}


def test_only_the_registry_and_the_strategies_name_engines():
    named = {name: quoted_strategies(name) for name in MODULES if not name.startswith("tfdist.strategies")}
    assert named.pop(REGISTRY)
    assert {name: found for name, found in named.items() if found} == OTHER_MEANINGS


_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def test_a_file_is_named_by_what_is_in_it():
    vague = re.compile(r"(.*_)?(utils?|helpers?|common|misc)(_test)?$")
    paths = [path.relative_to(ROOT).with_suffix("") for path in files()]
    assert not [path for path in paths if any(map(vague.match, path.parts))]


def test_import_tfdist_is_light_and_defines_no_flag(tmp_path: pathlib.Path):
    code = (
        "import json, sys\nfrom absl import flags\nbefore = set(flags.FLAGS)\nimport tfdist\n"
        "print(json.dumps([tfdist.__file__, sorted(set(flags.FLAGS) - before), sorted(sys.modules)]))"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=True
    )
    file, flags, modules = json.loads(done.stdout)
    assert pathlib.Path(file).is_relative_to(ROOT)
    assert not flags
    assert not {"tensorflow", "keras", "horovod", "matplotlib"} & set(modules)


def test_the_tree_speaks_of_itself_alone():
    elsewhere = ("/".join(("..", "shared")), "/".join(("", "work", "")))
    wrong = [
        f"{path.relative_to(ROOT)} mentions {place}"
        for path in files()
        for place in elsewhere
        if place in path.read_text(encoding="utf-8", errors="ignore")
    ]
    assert not wrong, "\n".join(wrong)


def test_a_public_method_has_a_docstring_or_overrides_another_one():
    """Those of other libraries, and of classes in functions, are not looked for."""
    classes = {node.name: node for tree in TREES.values() for node in tree.body if isinstance(node, ast.ClassDef)}

    def is_described(kind: ast.ClassDef, method: ast.FunctionDef) -> bool:
        own = [node for node in kind.body if isinstance(node, ast.FunctionDef) and node.name == method.name]
        if any(ast.get_docstring(node) for node in own):
            return True
        bases = [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in kind.bases]
        return any(base not in classes or is_described(classes[base], method) for base in bases)

    public = ((kind, node) for kind in classes.values() if kind.name[0] != "_" for node in kind.body)
    methods = [(kind, node) for kind, node in public if isinstance(node, ast.FunctionDef) and node.name[0] != "_"]
    assert len(methods) > 1000
    assert not [f"{kind.name}.{method.name}" for kind, method in methods if not is_described(kind, method)]
