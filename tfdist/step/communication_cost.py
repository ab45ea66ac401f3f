"""Communication of a step, as fields of a record."""


def cost_of(summed_bytes: float, exact_bytes: int, message_bytes: int = 0) -> dict[str, float]:
    """Returns what a step sends, as fields of a record; empty if that is nothing, or not known.

    Args:
      summed_bytes: bytes that a replica sends per step for the sum of gradients.
      exact_bytes: size of all gradients without compression.
      message_bytes: bytes that the process sends besides, to other stages of a pipeline.
    """
    payload = summed_bytes + message_bytes
    return {
        **({"payload_bytes": payload} if payload else {}),
        **({"message_bytes": message_bytes} if message_bytes else {}),
        **({"compression_ratio": exact_bytes / summed_bytes} if summed_bytes else {}),
    }
