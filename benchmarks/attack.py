"""Step time of a job while untrusted clients attack its control plane, compared with the same traffic to another port.

    python benchmarks/attack.py [--connections=2000] [--seconds=20] [--rounds=4]
    python benchmarks/attack.py --namespace        # from another network namespace, over a virtual Ethernet link: needs root

A job of two processes trains under `tfdist launch`; with `--namespace`, it has two hosts, which are both this one. A process
of another user (65534, if this one is root) keeps connections open and sends a byte on each from time to time; it sends
garbage, and hellos and old messages with a wrong token; and it connects again when it is closed. In turn, it does so at a port
of its own and at the job's. The result is the ratio of the steps per second.
"""

import argparse
import asyncio
import contextlib
import json
import os
import pathlib
import random
import resource
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

from tfdist.coordination.messages import HELLO_SECONDS, MAX_UNAUTHENTICATED, encode

HELLO = encode({"type": "hello", "rank": 1, "size": 2, "pid": 1, "host": "h", "nonce": "n"})
SEALED = b"0" * 64 + b" " + encode({"type": "join"})
NOBODY = 65534
LOOPBACK = "127.0.0.1"
NAMESPACE, ADDRESS, OTHER_ADDRESS, DEVICE, OTHER_DEVICE = (
    "tfdist-attack",
    "10.77.0.1",
    "10.77.0.2",
    "tfattack0",
    "tfattack1",
)
TRAIN = "--model=cnn --dataset=digits --batch_size=64 --steps=10000000 --log_every=5 --measure_every=0 --eval_every=0".split()


async def drip(address: str, port: int, closed: list[int]) -> None:
    """Keeps one connection open, a byte at a time, and opens another one when it is closed."""
    while True:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection(address, port)
            try:
                while not writer.is_closing():
                    writer.write(b"{")
                    await writer.drain()
                    await asyncio.sleep(random.uniform(2.0, 8.0))
            finally:
                closed[0] += 1
                writer.close()
        await asyncio.sleep(random.uniform(0.5, 1.5))


async def shout(address: str, port: int, answered: list[int]) -> None:
    """Sends garbage, a hello with a message under a wrong token, and what another connection has sent before."""
    while True:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(address, port)
            writer.write(random.choice([random.randbytes(200), HELLO + SEALED, SEALED, b"GET / HTTP/1.1\r\n\r\n"]))
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(2.0):
                    answered[0] += b"welcome" in await reader.read(1000)
            writer.close()
        await asyncio.sleep(0.2)


async def attack(address: str, port: int, connections: int) -> None:
    """Attacks a port of an address until this process is ended; prints what it has achieved every second."""
    closed, answered = [0], [0]
    tasks = [asyncio.create_task(drip(address, port, closed)) for _ in range(connections)]
    tasks += [asyncio.create_task(shout(address, port, answered)) for _ in range(20)]
    while tasks:
        await asyncio.sleep(1.0)
        print(json.dumps({"closed": closed[0], "admitted": answered[0]}), flush=True)


async def ignore(address: str) -> None:
    """Prints the port of a server that answers nothing, and closes as the job's does: the oldest of too many, and the slow."""
    opened: list[asyncio.StreamWriter] = []

    async def read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        opened.append(writer)
        if len(opened) > MAX_UNAUTHENTICATED:
            opened.pop(0).close()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(HELLO_SECONDS):
                while (await reader.read(1000)).startswith(b"{"):
                    pass
        if writer in opened:
            opened.remove(writer)
        writer.close()

    server = await asyncio.start_server(read, address, 0, backlog=512)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


@contextlib.contextmanager
def started(*arguments: str, prefix: Sequence[str] = ()) -> Iterator[subprocess.Popen]:
    """Starts this file with arguments in another process, which ends with the context."""
    process = subprocess.Popen([*prefix, sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True)
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


@contextlib.contextmanager
def namespace() -> Iterator[None]:
    """Creates a network namespace that reaches this one over a link of its own."""
    inside = ["ip", "netns", "exec", NAMESPACE, "ip"]
    subprocess.run(["ip", "netns", "add", NAMESPACE], check=True)
    try:
        for command in (
            ["ip", "link", "add", DEVICE, "type", "veth", "peer", "name", OTHER_DEVICE, "netns", NAMESPACE],
            ["ip", "address", "add", f"{ADDRESS}/30", "dev", DEVICE],
            ["ip", "link", "set", DEVICE, "up"],
            [*inside, "address", "add", f"{OTHER_ADDRESS}/30", "dev", OTHER_DEVICE],
            [*inside, "link", "set", OTHER_DEVICE, "up"],
        ):
            subprocess.run(command, check=True)
        yield
    finally:
        subprocess.run(["ip", "netns", "delete", NAMESPACE], check=True)


def free_port(address: str) -> int:
    """Returns a port on which nothing listens."""
    with socket.create_server((address, 0)) as server:
        return server.getsockname()[1]


@contextlib.contextmanager
def training(address: str, run: pathlib.Path) -> Iterator[tuple[int, subprocess.Popen]]:
    """Starts the job, and ends it; yields the port of its control plane and the launcher that listens there.

    A job on the loopback has one launcher; one with an address in a network has a launcher for each of its two hosts.
    """
    port = free_port(address)
    train = [sys.executable, "-m", "tfdist.train", *TRAIN, "--strategy=multiworker", f"--output_dir={run}"]
    launch = [sys.executable, "-m", "tfdist.launch", f"--coordinator={address}:{port}"]
    hosts = [["--nodes=2", f"--node_rank={rank}", "--processes=1"] for rank in (0, 1)]
    environment = {**os.environ, "TFDIST_TOKEN": secrets.token_hex(32)}
    launchers = [
        subprocess.Popen(
            [*launch, *options, f"--log_dir={run.parent}/logs{number}", "--", *train],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for number, options in enumerate([["--processes=2"]] if address == LOOPBACK else hosts)
    ]
    try:
        yield port, launchers[0]
    finally:
        for launcher in launchers:
            launcher.terminate()
        for launcher in launchers:
            launcher.wait(120)


def measure(arguments: argparse.Namespace) -> None:
    """Runs a job, and the traffic in turn; prints the ratios."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (8192, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    prefix = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"] if os.getuid() == 0 else []
    if arguments.namespace:
        prefix = ["ip", "netns", "exec", NAMESPACE, *prefix]
    address = ADDRESS if arguments.namespace else LOOPBACK
    with (
        namespace() if arguments.namespace else contextlib.nullcontext(),
        tempfile.TemporaryDirectory() as folder,
        started("--ignore", f"--address={address}") as decoy,
        training(address, pathlib.Path(folder) / "run") as (port, job),
    ):
        run = pathlib.Path(folder) / "run"
        while steps(run) < 50:
            assert job.poll() is None, "the job has ended"
            time.sleep(1.0)
        assert decoy.stdout
        ports = {"another port": int(decoy.stdout.readline()), "the job's port": port}
        found: dict[str, list[float]] = {name: [] for name in ports}
        for number in range(arguments.rounds):
            for name in sorted(ports, reverse=bool(number % 2)):
                options = [f"--attack={ports[name]}", f"--address={address}", f"--connections={arguments.connections}"]
                with started(*options, prefix=prefix) as attacker:
                    time.sleep(3.0)
                    found[name].append(rate(run, arguments.seconds))
                    attacker.kill()
                    achieved = json.loads(attacker.stdout.read().splitlines()[-1])
                assert job.poll() is None, "the job has ended"
                print(f"{name}: {found[name][-1]:.2f} steps/s, {achieved}", flush=True)
        ratios = [other / own for other, own in zip(found["another port"], found["the job's port"], strict=True)]
        median, least, most = statistics.median(ratios), min(ratios), max(ratios)
        print(f"step time, the job's port to another port: {median:.3f} ({least:.3f} to {most:.3f})")


def main() -> None:
    """Runs the benchmark, or one of its other processes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--connections", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--namespace", action="store_true", help="attack from another network namespace: needs root")
    parser.add_argument("--address", default=LOOPBACK, help=argparse.SUPPRESS)
    parser.add_argument("--attack", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--ignore", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.ignore:
        asyncio.run(ignore(arguments.address))
    elif arguments.attack:
        asyncio.run(attack(arguments.address, arguments.attack, arguments.connections))
    else:
        measure(arguments)


if __name__ == "__main__":
    main()
