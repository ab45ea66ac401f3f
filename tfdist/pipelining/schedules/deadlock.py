"""The error for processes that wait for each other."""

from collections.abc import Mapping

from tfdist.errors import InputError


def deadlock(waiting: Mapping[int, tuple[str, int]]) -> InputError:
    """Returns the error.

    Args:
      waiting: for each process that waits: a clause that ends with "process" and says for what, such as "to receive 0F1 from
        process", and the number of that process.
    """
    process, seen = next(iter(waiting)), list[int]()
    while process in waiting and process not in seen:
        seen.append(process)
        process = waiting[process][1]
    cycle = seen[seen.index(process) :] if process in seen else seen
    clauses = ", ".join(f"process {one} waits {waiting[one][0]} {waiting[one][1]}" for one in cycle)
    return InputError(
        f"Processes of a pipeline must not wait for each other in a cycle. Received: {clauses}. Each action must come after "
        "those whose results it needs."
    )
