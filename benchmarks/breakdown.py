r"""Where the time of a step goes: a table by category of operation, from a profile of TensorFlow.

    tfdist launch --processes=2 --launcher=horovod -- \
        tfdist train --strategy=horovod ... --profile_steps=40:50 --output_dir=RUN
    python benchmarks/breakdown.py RUN

Each moment of the profiled steps belongs to the operations that run in it, in equal parts. If none runs, it is waiting: for
messages if at least one is under way, else for anything else, such as the next batch.
"""

import argparse
import collections
import pathlib
import re
from collections.abc import Iterable, Mapping

import overlap

# The first pattern that an operation's name contains decides.
CATEGORIES = {
    "packing": r"/pack(_\d+)?/",
    "unpacking": r"/unpack(_\d+)?/",
    "checks of finiteness": r"/finite(_\d+)?/",
    "update": r"/cond_\d+/then/",
    "forward and backward": r"gradient_tape/|_loss|Softmax|/(mlp|cnn|transformer)\w*/",
}
COMMUNICATION, WAITING, OTHER = "waiting for messages", "other waiting", "other operations"


def category_of(name: str) -> str:
    """Returns the category of an operation, by its name."""
    for category, pattern in CATEGORIES.items():
        if re.search(pattern, name):
            return category
    return OTHER


def breakdown(operations: Iterable[overlap.Event], messages: Iterable[overlap.Event]) -> Mapping[str, float]:
    """Returns the milliseconds of each category; together, they are the time from the first operation to the last."""
    changes = []
    for event in operations:
        category = category_of(event.name)
        changes += [(event.begin, 1, category), (event.end, -1, category)]
    for event in messages:
        changes += [(event.begin, 1, COMMUNICATION), (event.end, -1, COMMUNICATION)]
    changes.sort()
    found: collections.Counter[str] = collections.Counter()
    active: collections.Counter[str] = collections.Counter()
    before = changes[0][0]
    for time, change, category in changes:
        running = {name: count for name, count in active.items() if count and name != COMMUNICATION}
        shares = running or {COMMUNICATION if active[COMMUNICATION] else WAITING: 1}
        for name, count in shares.items():
            found[name] += (time - before) * count / sum(shares.values())
        active[category] += change
        before = time
    return found


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=pathlib.Path, help="directory of a run with --profile_steps")
    operations, messages = overlap.read(parser.parse_args().run)
    if not messages:
        raise SystemExit("The profile must have messages of Horovod. Received: none. Profile a job of several ranks.")
    named = collections.Counter(message.name for message in messages)
    steps = max(named.values())  # a message of gradients is sent once per step
    found = breakdown(operations, messages)
    print("| category | ms per step | % |\n| --- | --- | --- |")
    for category, milliseconds in sorted(found.items(), key=lambda entry: -entry[1]):
        print(f"| {category} | {milliseconds / steps:.2f} | {100 * milliseconds / sum(found.values()):.1f} |")


if __name__ == "__main__":
    main()
