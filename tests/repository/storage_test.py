"""Durable files are accessed through `tfdist.storage`; modules with local files are listed here, with the reason."""

import ast
from collections.abc import Iterator

from tests.repository.architecture_test import TREES

OF_ONE_MACHINE = {
    "tfdist.storage": "the implementation for file systems",
    "tfdist.cli.doctor_machine": "what the kernel says of the machine",
    "tfdist.cli.doctor_engines": "outputs of processes that a check starts",
    "tfdist.launcher": "a launcher's own logs, progress files, outcomes, in-memory directories and namespaces",
    "tfdist.cluster": "progress files, signals, and what the kernel says of the machine",
    "tfdist.coordination.job_token": "secrets, whose owner and mode matter",
    "tfdist.data": "a user's datasets",
    "tfdist.config.dataset_files": "a user's datasets",
    "tfdist.run": "a user's program",
    "tfdist.launch": "a user's program, and network namespaces",
    "tfdist.trainer.program": "the code that runs",
    "tfdist.checkpoint.in_memory": "in-memory checkpoints, such as in /dev/shm",
    "tfdist.checkpoint.replication": "copies of them between hosts",
    "tfdist.reporting.environment": "what the kernel says of the process",
    "tfdist.parameter_server.table_rows": "a table that is read as a whole, in a temporary file",
    "tfdist.planning.trials": "what the kernel says of processes",
    "tfdist.cli.search": "flag files of trials",
    "tfdist.keras_fit.patches": "files that Keras's own `save` writes",
    "tfdist.install_horovod": "a build of Horovod",
    "tfdist.cli.horovod_build": "a build of Horovod",
    "tfdist.cli.command": "standard output, and the width of the terminal",
    "tfdist.cluster.quiet_tensorflow": "what TensorFlow prints while it is imported",
    "tfdist.cli.trained_run": "a copy of a model file, for Keras",
    "tfdist.export": "what is in a staged directory",
    "tfdist.__main__": "the commands of the package",
}
_OS = (
    "access chmod fdopen fsync link listdir lstat makedirs mkdir open preadv pwrite read remove rename replace rmdir scandir"
    " stat symlink truncate unlink utime walk write"
).split()
_OS_PATH = "exists getmtime getsize isdir isfile islink lexists realpath samefile".split()
_MODULES = {"fcntl", "shutil", "tempfile", "glob"}
# Methods that only pathlib.Path has; others are recognized by the number of their arguments.
_PATH = (
    "chmod exists/0 glob hardlink_to is_dir is_file is_symlink iterdir lstat mkdir read_bytes read_text rename/1 replace/1"
    " resolve rglob rmdir samefile stat symlink_to touch unlink write_bytes write_text"
).split()


def file_operations(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields line and name of each call that reads or changes local files."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        owner, _, called = name.rpartition(".")
        if name == "open" or owner.partition(".")[0] in _MODULES or (owner, called) == ("io", "open"):
            yield node.lineno, name
        elif (owner == "os" and called in _OS) or (owner == "os.path" and called in _OS_PATH):
            yield node.lineno, name
        elif owner not in ("", "os", "os.path") and {called, f"{called}/{len(node.args) + len(node.keywords)}"} & set(
            _PATH
        ):
            yield node.lineno, name


def test_durable_files_go_through_a_storage():
    wrong = [
        f"{module}:{line}: {call}"
        for module, tree in TREES.items()
        if not any(f"{module}.".startswith(f"{local}.") for local in OF_ONE_MACHINE)
        for line, call in file_operations(tree)
    ]
    assert not wrong, "\n".join(wrong)


def test_each_module_that_may_use_files_of_this_machine_does():
    for local in OF_ONE_MACHINE:
        own = [tree for module, tree in TREES.items() if f"{module}.".startswith(f"{local}.")]
        assert any(list(file_operations(tree)) for tree in own), local


def test_what_is_a_file_operation():
    code = "os.open(a)\nopen(a)\na.exists()\nshutil.rmtree(a)\nPath(a).mkdir()\nos.path.exists(a)\na.rename(b)"
    assert [line for line, _ in file_operations(ast.parse(code))] == [1, 2, 3, 4, 5, 6, 7]
    fine = "storage.exists(a)\nstorage.rename(a, b)\nCheckpoint.open(a)\nos.getpid()\na.replace(b, c)\nos.path.join(a)"
    assert not list(file_operations(ast.parse(f"{fine}\ndataclasses.replace(a, b=1)")))
