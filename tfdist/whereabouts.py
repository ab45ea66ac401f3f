"""Where this process is, as a person who looks for a hang wants to know it."""

import sys
import threading
import traceback

_FRAMES = 8


def main_stack() -> list[str]:
    """Returns the main thread's innermost calls of Python, each as `file:line function`, the innermost last.

    Of TensorFlow's own only the last one: the way through them is always the same, and long.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    stack = traceback.extract_stack(frame) if frame else []
    shown = [call for call in stack[:-1] if "/tensorflow/python/" not in call.filename] + stack[-1:]
    return [f"{call.filename}:{call.lineno} {call.name}" for call in shown[-_FRAMES:]]
