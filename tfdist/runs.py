"""List the runs in a directory, or compare runs: the flags that differ, the best values, and their curves as a picture."""

import collections
import contextlib
import dataclasses
import fnmatch
import sys
from collections.abc import Callable, Sequence
from typing import Any

from tfdist.cli import command
from tfdist.cli.output import TEXT, Output
from tfdist.cluster import terminal
from tfdist.config.fields import check_fields, flag_field, normalize_names
from tfdist.config.rules import split_at_commas
from tfdist.errors import ExitCode, InputError, nearest, one_line
from tfdist.reporting import RunDirectory, run_summary
from tfdist.reporting.file_errors import cause, reraise_as_output_error
from tfdist.reporting.plain_reporter import text_table
from tfdist.reporting.run_summary import RunSummary, is_higher_better, read_run
from tfdist.storage import StoragePath, path_of, storage_of

_SELECTION, _OUTPUT = "Selection", "Output"
_MAX_LISTED = 10
_MAX_METRICS = 3  # in the picture
_PICTURE = "comparison.png"
# Attributes of a `RunSummary` by name.
_SORT_KEYS = {"started": "start_time", "run": "name", "status": "status", "steps": "steps", "time": "seconds"}
_FIELDS = {"run": "name", "status": "status", "strategy": "strategy"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunsConfig:
    """The selection, order and columns of the listed runs."""

    filter: str = flag_field(
        "",
        _SELECTION,
        "Comma-separated conditions NAME=PATTERN that runs must match, such as strategy=mirrored,model=cnn*. NAME is run, "
        "status, or a training flag.",
    )
    sort: str = flag_field(
        "started",
        _SELECTION,
        "Order: started (the newest last), run, status, steps, time, or the name of a metric (the best last).",
    )
    limit: int = flag_field(0, _SELECTION, "Maximum number of runs to show, the last ones in this order. 0 shows all.")
    compare: bool = flag_field(False, _OUTPUT, "Compare the runs. Default if several directories are passed.")
    metric: str = flag_field(
        "",
        _OUTPUT,
        "Comma-separated metrics to show and to plot. Defaults to the loss and the first metrics.",
        check=normalize_names,
    )
    axis: str = flag_field(
        "step", _OUTPUT, "Horizontal axis of the picture: step, epoch or time.", choices=tuple(run_summary.AXES)
    )
    output: str = flag_field(
        "", _OUTPUT, f"Path of the picture of a comparison. Defaults to {_PICTURE} in the directory of the runs."
    )

    def __post_init__(self) -> None:
        check_fields(self)
        _conditions(self.filter)


def main(paths: Sequence[str], config: RunsConfig, output: Output = TEXT) -> int:
    """Prints tables of the runs in directories; returns the exit code."""
    all_runs, skip_notes = _find_runs([path_of(path) for path in paths])
    if not all_runs:
        skipped = (
            f" (skipped: {'; '.join(skip_notes[:_MAX_LISTED])})" if skip_notes else ", without runs" if paths else ""
        )
        raise InputError(
            f"tfdist runs needs a directory with runs. Received{': ' if paths else ' no directory'}{', '.join(paths)}{skipped}"
            ". Pass the directory of a run, or a directory that contains runs, such as the parent of an --output_dir."
        )
    metrics = list(dict.fromkeys(name for run in all_runs for name in run.metrics))
    for metric in filter(None, config.metric.split(",")):
        if metric not in metrics:
            raise InputError(f"--metric={metric} is not in these runs.{nearest(metric, metrics)}")
    runs = _select(all_runs, config)
    is_comparison = bool(config.compare or config.output) or len(paths) > 1
    with contextlib.suppress(BrokenPipeError):  # `| head` has read enough
        if output.is_json:
            output.result({"runs": [run_summary.as_json(run) for run in runs], "skipped": skip_notes})
        elif not runs:
            print(f"None of {len(all_runs)} runs matches --filter={config.filter}.")
        elif is_comparison:
            _compare(runs, path_of(paths[0]), config)
        else:
            columns = terminal.columns_of(sys.stdout) or None
            print(*run_summary.table(runs, _main_metric(runs, config), columns), sep="\n")
    if skip_notes and not output.is_json:
        more_text = f" and {len(skip_notes) - _MAX_LISTED} more" if len(skip_notes) > _MAX_LISTED else ""
        print(one_line(f"Skipped: {'; '.join(skip_notes[:_MAX_LISTED])}{more_text}."), file=sys.stderr)
    return ExitCode.DONE


def _find_runs(paths: Sequence[StoragePath]) -> tuple[list[RunSummary], list[str]]:
    """Returns the runs at `paths` or in their subdirectories, with unique names, and skipped directories with the reason.

    Directories without files of a run, such as those of a launcher's logs, are ignored.
    """
    runs, skip_notes = [], []
    for path in dict.fromkeys(paths):
        storage = storage_of(path)
        try:
            if not storage.is_directory(path):
                raise InputError(
                    f"tfdist runs takes directories. Received: {path}, which is not a directory. Pass the parent of an "
                    "--output_dir."
                )
            names = sorted(entry.name for entry in storage.entries(path) if storage.is_directory(path / entry.name))
            is_run = storage.exists(path / "starts.jsonl")
        except OSError as error:
            raise InputError(f"The directory of runs must be readable. Received: {path} ({cause(error)}).") from error
        for directory, name in [(path, path.name or str(path))] if is_run else [(path / name, name) for name in names]:
            try:
                if not RunDirectory(directory).is_unused:
                    runs.append(read_run(directory, name))
            except (InputError, OSError) as error:
                skip_notes.append(f"{name} ({_reason(error)})")
    counts = collections.Counter(run.name for run in runs)
    return [
        run if counts[run.name] == 1 else dataclasses.replace(run, name=str(run.directory.path)) for run in runs
    ], skip_notes


def _reason(error: Exception) -> str:
    text = cause(error) if isinstance(error, OSError) else str(error)
    return text.partition(" Restore the file")[0].rstrip(".")


def _select(runs: Sequence[RunSummary], config: RunsConfig) -> list[RunSummary]:
    def matches(run: RunSummary, name: str, pattern: str) -> bool:
        value = getattr(run, _FIELDS[name]) if name in _FIELDS else run.flags.get(name)
        return value is not None and (value == pattern or fnmatch.fnmatchcase(value, pattern))

    matching_runs = [run for run in runs if all(matches(run, *condition) for condition in _conditions(config.filter))]

    def key_of(name: str) -> Callable[[RunSummary], Any]:
        return lambda run: getattr(run, _SORT_KEYS[name]) or 0.0

    if config.sort in _SORT_KEYS:
        key = key_of(config.sort)
    else:
        metrics = {name for run in runs for name in run.metrics}
        if config.sort not in metrics:
            raise InputError(f"--sort={config.sort} is not known.{nearest(config.sort, [*_SORT_KEYS, *metrics])}")
        sign = 1 if is_higher_better(config.sort) else -1

        def key(run: RunSummary) -> tuple[bool, float]:
            best = run.best(config.sort)
            return best is not None, sign * best[1] if best else 0.0

    chronological = sorted(matching_runs, key=key_of("started"))
    return sorted(chronological, key=key)[-config.limit :]


def _conditions(text: str) -> list[tuple[str, str]]:
    """Returns the names and patterns of a filter; commas in parentheses belong to a pattern."""
    conditions = [part.partition("=") for part in split_at_commas(text)]
    for name, equals, _ in conditions:
        if not equals or not name.strip():
            raise InputError(
                f"--filter must consist of comma-separated NAME=PATTERN. Received: {text}. For example, pass "
                "status=finished, or model=cnn*,strategy=mirrored."
            )
    return [(name.strip(), pattern.strip()) for name, _, pattern in conditions]


def _main_metric(runs: Sequence[RunSummary], config: RunsConfig) -> str:
    names = config.metric.split(",") if config.metric else [name for run in runs for name in run.metrics]
    return next((name for name in names if name != "loss"), "")


def _compare(runs: Sequence[RunSummary], directory: StoragePath, config: RunsConfig) -> None:
    names = [run.name for run in runs]
    difference_rows = run_summary.differences(runs)
    blocks = [["flags that differ", *names], *difference_rows, ["", *("" for _ in names)], ["results", *names]]
    if not difference_rows:
        blocks = [["results", *names]]
        print(f"All flags of the {len(runs)} runs are equal, except --output_dir.\n")
    output_lines = text_table(
        run_summary.fit_rows([*blocks, *run_summary.results(runs)], terminal.columns_of(sys.stdout) or None)
    )
    print(*output_lines, sep="\n")
    metric_names = list(dict.fromkeys(name for run in runs for name in run.metrics))
    metrics = config.metric.split(",") if config.metric else metric_names[:_MAX_METRICS]
    if not metrics:
        print("\nThere are no records to plot.")
        return
    is_run = storage_of(directory).exists(directory / "starts.jsonl")
    path = path_of(config.output) if config.output else (directory.parent if is_run else directory) / _PICTURE
    picture = run_summary.png(run_summary.draw(runs, metrics, config.axis))
    with reraise_as_output_error(path):
        storage_of(path).make_directory(path.parent)
        storage_of(path).replace(path, picture)
    print(f"\ncurves: {path}")


_EXAMPLES = (
    "tfdist runs runs --filter=strategy=mirrored --sort=accuracy",
    "tfdist runs runs/one runs/two --output=comparison.png",
)

if __name__ == "__main__":
    arguments = "DIR | RUN RUN ..."
    sys.exit(
        command.run("runs", RunsConfig, main, about=__doc__, arguments=arguments, examples=_EXAMPLES, has_json=True)
    )
