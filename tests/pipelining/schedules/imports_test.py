"""Schedules are checked before TensorFlow is imported."""

import subprocess
import sys


def test_schedules_import_neither_tensorflow_nor_matplotlib():
    code = (
        "import sys\nfrom tfdist.pipelining import schedules\nfrom tfdist.pipelining.schedules import plot\n"
        "schedules.make_schedule('zb_h1', 4, 8)\n"
        "print(sorted({'tensorflow', 'keras', 'matplotlib', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout == "[]\n"
