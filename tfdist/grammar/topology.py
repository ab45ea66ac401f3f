"""Parses `--topology`: numbers of consecutive replicas per host, such as `2,2`."""

import re


def parse_topology(text: str) -> tuple[int, ...] | None:
    """Returns the number of replicas on each host; None if the text is anything else than positive numbers."""
    counts = [count.strip() for count in text.split(",")]
    if not all(re.fullmatch(r"[1-9][0-9]{0,8}", count) for count in counts):
        return None
    return tuple(map(int, counts))
