"""Validation of `--all_reduce` and `--topology`. Reads the file of a table of algorithms."""

from tfdist.errors import InputError
from tfdist.grammar.all_reduce import AlgorithmTable, parse_all_reduce, parse_table
from tfdist.grammar.topology import parse_topology
from tfdist.storage.text import read_text


def all_reduce_text(text: str) -> str:
    """Validates how sums over replicas are computed, and the file that it names, if any."""
    choice = parse_all_reduce(text)
    if choice.table:
        read_table(choice.table)
    return text


def topology_text(text: str) -> str:
    """Normalizes comma-separated numbers of replicas by host; may be empty."""
    counts = parse_topology(text) if text else ()
    if counts is None:
        raise InputError(f"{text} must be numbers of replicas above 0, one for each host. Write 2,2")
    return ",".join(map(str, counts))


def read_table(file: str) -> AlgorithmTable:
    """Reads a table of algorithms.

    Raises:
      InputError: there is no such file, or it contains something else.
    """
    rule = "table must be a file with a table of algorithms, such as all_reduce.csv of another run."
    return parse_table(read_text(file, rule), file)
