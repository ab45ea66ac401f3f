"""Stack dumps of this process for debugging hangs."""

import pathlib
import sys
import sysconfig
import threading
import traceback

_FRAMES = 8
_OURS = pathlib.Path(__file__).resolve().parents[1]
_PATHS = sysconfig.get_paths()
_LIBRARIES = (
    *(_PATHS[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    f"{_OURS}/",
    f"{_OURS.parent / 'strategies'}/",
    "<frozen",
)


def main_stack() -> list[str]:
    """Returns the main thread's innermost Python calls, each as `file:line function`, the innermost last.

    Of TensorFlow's calls only the last one is included, because the others are always the same.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    stack = traceback.extract_stack(frame) if frame else []
    shown = [call for call in stack[:-1] if "/tensorflow/python/" not in call.filename] + stack[-1:]
    return [f"{call.filename}:{call.lineno} {call.name}" for call in shown[-_FRAMES:]]


def caller_location() -> str:
    """Returns the calling thread's location in the program's own code, outside all libraries, as `file, line N`."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}, line {frame.f_lineno}"
