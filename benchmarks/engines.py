r"""One operation over several libraries: a table and a picture, from runs of `tfdist bench collectives`.

Medians alone: repeat the runs to see how much they vary.

    for library in gloo mpi; do
        tfdist launch --launcher=horovod --processes=2 -- tfdist bench collectives --strategy=horovod \
            --communication=$library --operations=all_reduce --sizes=4KB:64MB --output_dir=runs/$library
    done
    python benchmarks/engines.py docs/guides/engines.png Gloo=runs/gloo MPI=runs/mpi
"""

import argparse
import json
import pathlib
from collections.abc import Mapping

from matplotlib.figure import Figure

Times = Mapping[int, float]  # milliseconds by size in bytes
_UNITS = ((2**20, "MB"), (2**10, "KB"), (1, "B"))


def read(run: pathlib.Path, operation: str) -> Times:
    """Returns the median milliseconds of an operation by size."""
    records = [json.loads(line) for line in (run / "collectives.jsonl").read_text().splitlines()]
    return {one["bytes"]: 1e3 * one["seconds_median"] for one in records if one["operation"] == operation}


def table(engines: Mapping[str, Times]) -> str:
    """Returns a Markdown table with a row for each library and a column for each size."""
    sizes = sorted({size for times in engines.values() for size in times})
    lines = [["", *map(_size, sizes)], ["---"] * (len(sizes) + 1)]
    lines += [
        [name, *(f"{times[size]:.3g}" if size in times else "" for size in sizes)] for name, times in engines.items()
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def draw(engines: Mapping[str, Times], operation: str) -> Figure:
    """Returns the figure: time by size, one line per library."""
    figure = Figure(figsize=(7, 4.4), dpi=110, layout="constrained")
    axes = figure.subplots()
    for name, times in engines.items():
        axes.plot(list(times), list(times.values()), marker="o", markersize=4, label=name)
    sizes = sorted({size for times in engines.values() for size in times})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sizes[:1]
    for size in sizes:
        if size >= 4 * ticks[-1]:  # otherwise the labels overlap
            ticks.append(size)
    axes.set_xticks(ticks, labels=list(map(_size, ticks)))
    axes.minorticks_off()
    axes.set_xlabel("size of each rank's tensor")
    axes.set_ylabel("milliseconds, median")
    axes.set_title(operation, loc="left")
    axes.grid(color="#e6e6e6")
    axes.legend(frameon=False)
    return figure


def _size(count: int) -> str:
    unit, name = next((unit, name) for unit, name in _UNITS if count >= unit)
    return f"{count / unit:g} {name}"


def main() -> None:
    """Prints the table and writes the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=pathlib.Path, help="file to write")
    parser.add_argument("runs", nargs="+", help="NAME=DIRECTORY of each run")
    parser.add_argument("--operation", default="all_reduce")
    given = parser.parse_args()
    named = (run.partition("=") for run in given.runs)
    engines = {name: read(pathlib.Path(directory), given.operation) for name, _, directory in named}
    print(table(engines))
    draw(engines, given.operation).savefig(given.picture)


if __name__ == "__main__":
    main()
