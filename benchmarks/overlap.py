"""Whether communication and the backward pass overlap: a picture of one step, from a profile of TensorFlow.

    tfdist launch --processes=2 --launcher=horovod -- \
        tfdist train --strategy=horovod ... --profile_steps=40:43 --output_dir=RUN
    python benchmarks/overlap.py RUN docs/guides/overlap.png

Above the engine's operations, below a bar for each message of gradients, from when it was handed to Horovod to when its
sum was there. Says what the first message overlaps with; exit code 1 if it left after the last backward operation.
"""

import argparse
import pathlib
import sys
from collections.abc import Iterator
from typing import NamedTuple

from matplotlib.figure import Figure

BACKWARD, COLLECTIVE = "gradient_tape/", "Horovod"
MINIMUM_MS = 0.05  # shorter operations are not drawn


class Event(NamedTuple):
    """Something that the profiler saw, in milliseconds.

    Attributes:
      begin: since the first event.
      end: since the first event.
      name: of the operation.
    """

    begin: float
    end: float
    name: str


def read(folder: pathlib.Path) -> tuple[list[Event], list[Event]]:
    """Reads a profile: the operations, and the messages of Horovod."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    [file] = sorted(folder.rglob("*.xplane.pb"))[-1:]
    space = xplane_pb2.XSpace()
    space.ParseFromString(file.read_bytes())
    operations, messages, handed = [], [], {}
    for begin, end, name, stats in sorted(_events(space), key=lambda event: event[0]):
        if name == "ExecutorState::ProcessAsync::Start" and COLLECTIVE in stats.get("kernel_type", ""):
            handed[stats["name"]] = begin
        elif name == "ExecutorState::ProcessAsync::Done" and stats.get("name") in handed:
            messages.append(Event(handed.pop(stats["name"]), begin, stats["name"]))
        elif "/" in name and ":" in name:
            operations.append(Event(begin, end, name))
    return operations, messages


def _events(space: object) -> Iterator[tuple[float, float, str, dict[str, str]]]:
    for plane in space.planes:  # type: ignore[attr-defined]
        names = {number: meta.name for number, meta in plane.stat_metadata.items()}
        for line in plane.lines:
            for event in line.events:
                begin = line.timestamp_ns / 1e6 + event.offset_ps / 1e9
                stats = {
                    names[stat.metadata_id]: stat.str_value or names.get(stat.ref_value, "") for stat in event.stats
                }
                name = plane.event_metadata[event.metadata_id].name
                yield begin, begin + event.duration_ps / 1e9, name, stats


def last_step(operations: list[Event], messages: list[Event]) -> tuple[list[Event], list[Event]]:
    """Those of the last profiled step, in milliseconds since its first operation."""
    last = {event.name: event for event in messages}  # in the order of time: of each name the last one stays
    first = min(event.begin for event in last.values())
    before = max((event.end for event in messages if event.begin < first), default=0.0)
    # An update, which stands in a condition, still belongs to the step before.
    began = min(event.begin for event in operations if event.begin > before and "/cond" not in event.name)
    operations, messages = (
        [event._replace(begin=event.begin - began, end=event.end - began) for event in events if event.begin >= began]
        for events in (operations, messages)
    )
    return operations, messages


def draw(operations: list[Event], messages: list[Event], path: pathlib.Path) -> None:
    """Writes the picture."""
    figure = Figure(figsize=(10, 1.6 + 0.28 * len(messages)), layout="constrained")
    axes = figure.subplots()
    for event in operations:
        kind = "C0" if BACKWARD in event.name else "C7"
        if event.end - event.begin >= MINIMUM_MS:
            axes.barh(
                0, event.end - event.begin, left=event.begin, height=0.8, color=kind, edgecolor="white", linewidth=0.3
            )
    for row, message in enumerate(messages, start=1):
        axes.barh(row, message.end - message.begin, left=message.begin, height=0.6, color="C1")
    labels = [message.name.rpartition("gradients/")[2] for message in messages]
    axes.set_yticks(range(len(messages) + 1), ["operations", *labels])
    axes.invert_yaxis()
    axes.axvline(_end_of_backward(operations), color="C0", linestyle=":", label="end of the backward pass")
    for color, label in (("C7", "forward, update"), ("C0", "backward"), ("C1", "message: handed over to summed")):
        axes.barh(0, 0, color=color, label=label)
    axes.legend(loc="lower left", fontsize="small")
    axes.set_xlabel("milliseconds of a step")
    figure.savefig(path, dpi=110)


def _end_of_backward(operations: list[Event]) -> float:
    return max(event.end for event in operations if BACKWARD in event.name)


def main() -> int:
    """Draws, and says what was seen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=pathlib.Path, help="folder of a run with --profile_steps")
    parser.add_argument("picture", type=pathlib.Path, help="file to write")
    given = parser.parse_args()
    operations, messages = last_step(*read(given.run))
    draw(operations, messages, given.picture)
    first, end = messages[0], _end_of_backward(operations)
    print(f"First message handed over at {first.begin:.1f} ms, summed at {first.end:.1f} ms;", end=" ")
    print(
        f"the last backward operation ends at {end:.1f} ms, the last message at {max(m.end for m in messages):.1f} ms."
    )
    return int(first.begin >= end)


if __name__ == "__main__":
    sys.exit(main())
