"""Step time of a job while strangers attack its control plane, compared with the same traffic to another port.

    python benchmarks/attack.py [--connections=2000] [--seconds=20] [--rounds=4]

A job of two processes trains under `tfdist.launch`. A process of another user (65534, if this one is root) keeps connections
open and sends a byte on each from time to time; it sends garbage, and hellos and old messages with a wrong token; and it
connects again when it is closed. In turn, it does so at a port of its own and at the job's. The result is the ratio of the
steps per second.
"""

import argparse
import asyncio
import contextlib
import json
import os
import pathlib
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import psutil

from tfdist.coordination.handshake import HELLO_SECONDS, MOST_STRANGERS
from tfdist.coordination.messages import VERSION, encode

HELLO = encode({"type": "hello", "rank": 1, "size": 2, "version": VERSION, "pid": 1, "host": "h", "nonce": "n"})
SEALED = b"0" * 64 + b" " + encode({"type": "join"})
NOBODY = 65534
TRAIN = "--model=cnn --dataset=digits --batch_size=64 --steps=10000000 --log_every=5 --measure_every=0 --eval_every=0".split()


async def drip(port: int, closed: list[int]) -> None:
    """Keeps one connection open, a byte at a time, and opens another one when it is closed."""
    while True:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                while not writer.is_closing():
                    writer.write(b"{")
                    await writer.drain()
                    await asyncio.sleep(random.uniform(2.0, 8.0))
            finally:
                closed[0] += 1
                writer.close()
        await asyncio.sleep(random.uniform(0.5, 1.5))


async def shout(port: int, answered: list[int]) -> None:
    """Sends garbage, a hello with a message under a wrong token, and what another connection has sent before."""
    while True:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(random.choice([random.randbytes(200), HELLO + SEALED, SEALED, b"GET / HTTP/1.1\r\n\r\n"]))
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(2.0):
                    answered[0] += b"welcome" in await reader.read(1000)
            writer.close()
        await asyncio.sleep(0.2)


async def attack(port: int, connections: int) -> None:
    """Attacks a port until this process is ended; prints what it has achieved every second."""
    closed, answered = [0], [0]
    tasks = [asyncio.create_task(drip(port, closed)) for _ in range(connections)]
    tasks += [asyncio.create_task(shout(port, answered)) for _ in range(20)]
    while tasks:
        await asyncio.sleep(1.0)
        print(json.dumps({"closed": closed[0], "admitted": answered[0]}), flush=True)


async def ignore() -> None:
    """Prints the port of a server that answers nothing, and closes as the job's does: the oldest of too many, and the slow."""
    opened: list[asyncio.StreamWriter] = []

    async def read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        opened.append(writer)
        if len(opened) > MOST_STRANGERS:
            opened.pop(0).close()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(HELLO_SECONDS):
                while (await reader.read(1000)).startswith(b"{"):
                    pass
        if writer in opened:
            opened.remove(writer)
        writer.close()

    server = await asyncio.start_server(read, "127.0.0.1", 0, backlog=512)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


@contextlib.contextmanager
def started(*arguments: str, user: int | None = None) -> Iterator[subprocess.Popen]:
    """Starts this file with arguments in another process, which ends with the context."""
    as_user = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"] if user else []
    process = subprocess.Popen([*as_user, sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def steps(run: pathlib.Path) -> int:
    """Returns the last step that a run has recorded."""
    lines = (run / "metrics.jsonl").read_text().splitlines() if (run / "metrics.jsonl").exists() else []
    return max((json.loads(line)["step"] for line in lines[-2:]), default=0)


def rate(run: pathlib.Path, seconds: float) -> float:
    """Returns the steps per second of the next seconds."""
    before, began = steps(run), time.monotonic()
    time.sleep(seconds)
    return (steps(run) - before) / (time.monotonic() - began)


def control_port(launcher: int) -> int:
    """Returns the port of a launcher's control plane."""
    [found] = [c for c in psutil.Process(launcher).net_connections("inet") if c.status == psutil.CONN_LISTEN]
    return found.laddr.port


def measure(arguments: argparse.Namespace) -> None:
    """Runs a job, and the traffic in turn; prints the ratios."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (8192, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    user = NOBODY if os.getuid() == 0 else None
    with tempfile.TemporaryDirectory() as folder, started("--ignore") as decoy:
        run = pathlib.Path(folder) / "run"
        command = [sys.executable, "-m", "tfdist.launch", "--processes=2", f"--log_dir={folder}/logs", "--"]
        command += [sys.executable, "-m", "tfdist.train", *TRAIN, "--strategy=multiworker", f"--output_dir={run}"]
        job = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            while steps(run) < 50:
                assert job.poll() is None, "the job has ended"
                time.sleep(1.0)
            assert decoy.stdout
            ports = {"another port": int(decoy.stdout.readline()), "the job's port": control_port(job.pid)}
            found: dict[str, list[float]] = {name: [] for name in ports}
            for number in range(arguments.rounds):
                for name in sorted(ports, reverse=bool(number % 2)):
                    with started(
                        f"--attack={ports[name]}", f"--connections={arguments.connections}", user=user
                    ) as attacker:
                        time.sleep(3.0)
                        found[name].append(rate(run, arguments.seconds))
                        attacker.kill()
                        achieved = json.loads(attacker.stdout.read().splitlines()[-1])
                    assert job.poll() is None, "the job has ended"
                    print(f"{name}: {found[name][-1]:.2f} steps/s, {achieved}", flush=True)
            ratios = [other / own for other, own in zip(found["another port"], found["the job's port"], strict=True)]
            median, least, most = statistics.median(ratios), min(ratios), max(ratios)
            print(f"step time, the job's port to another port: {median:.3f} ({least:.3f} to {most:.3f})")
        finally:
            job.terminate()
            job.wait(120)


def main() -> None:
    """Runs the benchmark, or one of its other processes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--connections", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--attack", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--ignore", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.ignore:
        asyncio.run(ignore())
    elif arguments.attack:
        asyncio.run(attack(arguments.attack, arguments.connections))
    else:
        measure(arguments)


if __name__ == "__main__":
    main()
