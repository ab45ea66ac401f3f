import dataclasses
import subprocess
import sys

import pytest

from tfdist.bench import BenchConfig, parse_sizes
from tfdist.errors import InputError

# Users have these names in scripts: names may be added but not renamed.
NAMES = """
    all_reduce communication coordinator devices dtype insecure intra_op_threads operations output_dir repeat_seconds repeats
    sizes start_timeout_seconds strategy token_file topology tpu
""".split()


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("4", (4,)),
        ("4,64KB, 1MB", (4, 2**16, 2**20)),
        ("4b:64", (4, 16, 64)),
        ("64KiB,1.5MiB", (2**16, 3 * 2**19)),
        ("1k:20K", (2**10, 2**12, 2**14)),
        ("1GB", (2**30,)),
        ("8:8", (8,)),
    ],
)
def test_sizes(text, sizes):
    assert parse_sizes(text) == sizes


def test_the_default_is_from_4_bytes_to_64_mb():
    sizes = parse_sizes(BenchConfig().sizes)
    assert (sizes[0], sizes[-1], len(sizes)) == (4, 64 * 2**20, 13)


def test_operations():
    assert BenchConfig(operations=" barrier , all_reduce").operations == "barrier,all_reduce"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sizes": "4,"}, "Received: ''."),
        ({"repeat_seconds": -1.0}, "--repeat_seconds must be at least 0"),
        ({"devices": 2, "strategy": "horovod"}, "Received: --devices=2 --strategy=horovod"),
    ],
)
def test_refuses(given, message):
    with pytest.raises(InputError) as caught:
        BenchConfig(**given)
    assert message in str(caught.value)


def test_the_flag_set_is_pinned():
    assert sorted(field.name for field in dataclasses.fields(BenchConfig)) == NAMES


def test_imports_no_tensorflow():
    code = "import sys, tfdist.bench; sys.exit(bool({'tensorflow', 'keras', 'numpy', 'matplotlib'} & {*sys.modules}))"
    assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == 0
