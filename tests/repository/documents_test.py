"""Commands, flags, files and tests that the documentation mentions exist."""

import ast
import itertools
import pathlib
import re
import shlex
from collections.abc import Callable

import pytest
from absl import flags as absl_flags

from tfdist import bench, doctor, install_horovod, launch
from tfdist.__main__ import commands
from tfdist.cli import flags
from tfdist.config import job_config, layout_config, train_config
from tfdist.config.trained_config import EvaluateConfig, PredictConfig
from tfdist.errors import ExitCode
from tfdist.export import ExportConfig
from tfdist.launcher.job_controller import FINAL_CODES, MAX_EARLY_FAILURES
from tfdist.runs import RunsConfig

ROOT = pathlib.Path(__file__).parents[2]
NAMES = (
    "README.md",
    "BUILD.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")),
    "examples/README.md",
)
TEXTS = {name: (ROOT / name).read_text(encoding="utf-8") for name in NAMES}
DEFINE: dict[str, Callable[[absl_flags.FlagValues], object]] = {
    "bench": lambda values: flags.define(values, bench.BenchConfig),
    "train": flags.define,
    "explain": flags.define,
    "verify": lambda values: flags.define(values, train_config.VerifyConfig),
    "launch": launch.define_flags,
    "run": lambda values: flags.define(values, job_config.RunConfig),
    "export": lambda values: flags.define(values, ExportConfig),
    "doctor": doctor.define_flags,
    "ledger": lambda values: None,
    "checkpoints": lambda values: None,
    "evaluate": lambda values: flags.define(values, EvaluateConfig),
    "predict": lambda values: flags.define(values, PredictConfig),
    "runs": lambda values: flags.define(values, RunsConfig),
    "layout": lambda values: flags.define(values, layout_config.LayoutConfig),
    "install_horovod": lambda values: flags.define(values, install_horovod.InstallConfig),
}
EVERY_COMMANDS = ("help", "helpjson", "flagfile", "config")
WITH_JSON = ("bench", "checkpoints", "doctor", "layout", "ledger", "runs", "train", "verify")


def shell_lines(text: str) -> list[str]:
    """Returns the commands in ```bash and ```console blocks, with continued lines joined."""
    lines = []
    for kind, block in re.findall(r"```(bash|console)\n(.*?)```", text, re.DOTALL):
        joined = block.replace("\\\n", " ").splitlines()
        lines += [line.removeprefix("$ ") for line in joined if kind == "bash" or line.startswith("$ ")]
    return [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]


def uses(text: str) -> list[tuple[str, list[str]]]:
    """Yields each `python -m tfdist.NAME` and `tfdist NAME` in a text's blocks and inline code: the command, and its flags."""
    shown = shell_lines(text) + re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    found: list[tuple[str, list[str]]] = []
    for line in shown:
        for part in re.split(r"python -m tfdist\.|(?<![\w./-])tfdist (?:help )?(?=[a-z])(?!help |[a-z ]+: )", line)[1:]:
            command, *arguments = shlex.split(part.replace("\\|", "|").replace("...", ""), comments=True)
            own = itertools.takewhile(lambda argument: argument != "--", arguments)
            if not command.startswith("<"):
                found.append((command, [a.partition("=")[0][2:] for a in own if re.match(r"--\w", a)]))
    return found


def known_flags(command: str) -> absl_flags.FlagValues:
    values = absl_flags.FlagValues()
    DEFINE[command](values)
    if command in WITH_JSON:
        absl_flags.DEFINE_boolean("json", False, "", flag_values=values)
    return values


def test_every_command_is_checked_and_documented():
    assert DEFINE.keys() == commands().keys()
    shown = {command for text in TEXTS.values() for command, _ in uses(text)}
    assert shown >= commands().keys()


@pytest.mark.parametrize("name", NAMES)
def test_commands_and_flags_that_are_shown_exist(name: str):
    for command, shown in uses(TEXTS[name]):
        assert command in DEFINE
        known = {*known_flags(command), *EVERY_COMMANDS}
        assert {flag if flag in known else flag.removeprefix("no") for flag in shown} <= known, command


def test_commands_of_horovodrun_name_the_library():
    """Otherwise a Horovod with MPI needs the mpirun of its environment, which must be activated."""
    texts = [*TEXTS.values(), *(path.read_text() for path in (ROOT / "examples").rglob("*.flags"))]
    shown = [command for text in texts for command in re.findall(r"horovodrun (-[^`]*?) python", text)]
    assert not [command for command in shown if not re.search("--(gloo|mpi|host-discovery-script)", command)]


@pytest.mark.parametrize("name", NAMES)
def test_flags_that_are_named_in_the_text_exist(name: str):
    """Flags of other programs are listed here: of horovodrun, Slurm, torchrun, and other libraries."""
    others = {"network-interfaces", "gpus-per-task", "gpus-per-node", "nproc-per-node", "lr", "num_gpus"}
    ours = {flag for command in DEFINE for flag in known_flags(command)} | set(EVERY_COMMANDS)
    prose = re.sub(r"```.*?```", "", TEXTS[name], flags=re.DOTALL)
    shown = {flag for code in re.findall(r"`(--[^`]*)`", prose) for flag in re.findall(r"--([a-z][\w-]*)", code)}
    assert shown <= ours | others


@pytest.mark.parametrize("name", NAMES)
def test_files_and_tests_that_are_named_exist(name: str):
    code = re.findall(r"`((?:tests|docs|examples|tfdist|strategies|benchmarks)/[\w./-]*)`", TEXTS[name])
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", TEXTS[name])
    base = (ROOT / name).parent
    missing = [path for path in code if "NAME" not in path and not (ROOT / path).exists()]
    missing += [link for link in links if not (base / link).exists()]
    assert not missing


@pytest.mark.parametrize("name", NAMES)
def test_headings_that_are_linked_exist(name: str):
    prose = re.sub(r"```.*?```", "", TEXTS[name], flags=re.DOTALL)
    for page, heading in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", prose):
        target = (ROOT / name).parent / page if page else ROOT / name
        headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
        assert heading in {re.sub(r"[^\w -]", "", each).lower().replace(" ", "-") for each in headings}, page


def test_the_readme_is_short():
    assert len(TEXTS["README.md"].splitlines()) < 200


def test_the_help_of_restarts_names_each_end_that_is_final():
    values = absl_flags.FlagValues()
    launch.define_flags(values)
    said = values["max_restarts"].help
    assert said and all(f"{int(code)}" in said for code in FINAL_CODES - {ExitCode.DONE})
    early = f"{MAX_EARLY_FAILURES} failures in a row before training begins"
    assert all(words in said for words in ("diverged replicas", "after the same step", early))


def features():
    lines = (ROOT / "docs" / "guides" / "compared.md").read_text(encoding="utf-8").splitlines()
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return table[2:]  # without the header and the line below it


def functions_in(path):
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def test_there_are_27_features_with_a_test_each_which_exists():
    assert len(features()) == 27 and all(len(row) == 6 for row in features())
    for feature, *_, ours, test in features():
        assert bool(test) != (ours == "not yet"), feature
        if test:
            path, name = re.fullmatch(r"`(tests/\S+_test\.py)(?:::(test_\w+))?`", test).groups()
            assert (ROOT / path).is_file(), feature
            assert not name or name in functions_in(ROOT / path), feature
