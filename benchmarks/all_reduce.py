#!/usr/bin/env python
"""All-reduce algorithms on four hosts in two racks, with a slow link between the racks: bytes over that link, and times.

    python benchmarks/all_reduce.py --rate=100mbit --strategy=horovod

Needs root and iproute2. The hosts are network namespaces, joined by a bridge in each rack; the bridges are joined by a pair of
interfaces whose rate is limited, and whose counters say how many bytes cross the link. Two jobs are run: with the ranks of a
rack next to each other, and in the worst order for a ring, in which every neighbor is in the other rack.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

RANKS, PORT = 4, 12345
COUNTED_BYTES, COUNTED_CALLS = 4 * 2**20, 3
SIZES = [1024 * 4**i for i in range(7)]
ORDERS = {"rank order": (0, 1, 2, 3), "worst order": (0, 2, 1, 3)}  # by rank: the host; hosts 0 and 1 are a rack
TOPOLOGIES = {"rank order": "2,2", "worst order": ""}


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


@contextmanager
def racks(rate: str) -> Iterator[str]:
    """Creates the network; yields the prefix of its namespaces: PREFIX0 to PREFIX3, and PREFIXs for the switches."""
    prefix = f"tfdist{os.getpid()}x"
    switch, names = f"{prefix}s", [f"{prefix}{host}" for host in range(RANKS)]
    try:
        ip("netns", "add", switch)
        ip("-n", switch, "link", "add", "west", "type", "veth", "peer", "name", "east")
        for bridge, end in (("rack0", "west"), ("rack1", "east")):
            ip("-n", switch, "link", "add", bridge, "type", "bridge")
            ip("-n", switch, "link", "set", end, "master", bridge)
            for device in (bridge, end):
                ip("-n", switch, "link", "set", device, "up")
            limit = ["tc", "qdisc", "add", "dev", end, "root", "tbf", "rate", rate, "burst", "512kb", "latency", "50ms"]
            subprocess.run(["ip", "netns", "exec", switch, *limit], check=True)
        for host, name in enumerate(names):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", f"port{host}", "netns", switch)
            ip("-n", name, "address", "add", f"10.77.0.{host + 1}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", switch, "link", "set", f"port{host}", "master", f"rack{host // 2}")
            ip("-n", switch, "link", "set", f"port{host}", "up")
        yield prefix
    finally:
        for name in (*names, switch):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def job(prefix: str, order: str, strategy: str, sizes: int, seconds: float) -> dict:
    """Runs the ranks of a job on their hosts; returns what rank 0 has measured."""
    with tempfile.TemporaryDirectory() as folder:
        result, children = pathlib.Path(folder, "result.json"), []
        for rank, host in enumerate(ORDERS[order]):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(RANKS),
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": f"10.77.0.{ORDERS[order][0] + 1}",
                "MASTER_PORT": str(PORT),
                "TFDIST_TOKEN": f"{os.getpid():064x}",
            }
            worker = [sys.executable, __file__, "--worker", strategy, order, f"{prefix}s", str(result), str(sizes)]
            with pathlib.Path(folder, f"{rank}.log").open("wb") as log:
                command = ["ip", "netns", "exec", f"{prefix}{host}", *worker]
                children.append(
                    subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
                )
        deadline = time.monotonic() + seconds
        while any(child.poll() is None for child in children) and time.monotonic() < deadline:
            time.sleep(0.1)
        codes = [child.poll() for child in children]
        for child in children:
            child.kill()
        if any(codes) or None in codes:
            for rank, code in enumerate(codes):
                print(
                    f"rank {rank}, code {code}:",
                    pathlib.Path(folder, f"{rank}.log").read_text()[-2000:],
                    file=sys.stderr,
                )
            raise SystemExit(1)
        return json.loads(result.read_text())


def work(strategy_name: str, order: str, switch: str, result: str, sizes: int) -> None:
    """Measures on one rank."""
    import tfdist
    from tfdist.collectives.all_reduce_algorithms import possible_algorithms
    from tfdist.trainer import auto_all_reduce

    strategy = tfdist.load_strategy(strategy_name, all_reduce="auto", topology=TOPOLOGIES[order])
    tuned = strategy.tuned_collectives

    def crossed() -> int:
        strategy.group.barrier(f"count/{next(numbers)}")
        [link] = json.loads(ip("-n", switch, "-j", "-s", "link", "show", "dev", "west"))
        strategy.group.barrier(f"counted/{next(numbers)}")
        return link["stats64"]["tx"]["bytes"] + link["stats64"]["rx"]["bytes"]

    numbers = iter(range(10**6))
    counted = {}
    for name in possible_algorithms(tuned.topology):
        call = auto_all_reduce.compiled_call(strategy, tuned, name, COUNTED_BYTES)
        call()
        before = crossed()
        for _ in range(COUNTED_CALLS):
            call()
        counted[name] = (crossed() - before) / COUNTED_CALLS / COUNTED_BYTES
    times = [auto_all_reduce.measure(strategy, SIZES[:sizes]) for _ in range(2)]
    if strategy.is_chief:
        bands = [list(band) for band in auto_all_reduce.fastest_algorithms(times[0]).bands]
        pathlib.Path(result).write_text(json.dumps({"counted": counted, "times": times, "table": bands}))
    strategy.group.barrier("end")
    strategy.group.leave()
    strategy.close()


def show(order: str, found: dict) -> None:
    from tfdist.config.all_reduce import AlgorithmTable, Band
    from tfdist.errors import byte_size

    names = list(found["counted"])
    print(f"\n{order}\n\n| | {' | '.join(names)} | auto |")
    print("| --- " * (len(names) + 2) + "|")
    counts = " | ".join(f"{found['counted'][name]:.2f}" for name in names)
    print(f"| bytes over the link, as a multiple of n | {counts} | |")
    table = AlgorithmTable(tuple(Band(*band) for band in found["table"]))
    for size, times in found["times"][1].items():
        chosen = table.algorithm_for(int(size))
        ratio = times[chosen] / min(times.values())
        cells = " | ".join(f"{1e3 * times[name]:.3g}" for name in names)
        print(f"| {byte_size(int(size))}, ms | {cells} | {chosen}: {ratio:.2f} of the best |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="100mbit", help="rate of the link between the racks, for tc")
    parser.add_argument("--strategy", default="horovod", choices=("horovod", "multiworker"))
    parser.add_argument("--sizes", type=int, default=len(SIZES), help="number of sizes, by factors of 4 from 1 KiB")
    parser.add_argument("--seconds", type=float, default=300, help="time limit of a job")
    options = parser.parse_args()
    found = {}
    with racks(options.rate) as prefix:
        for order in ORDERS:
            found[order] = job(prefix, order, options.strategy, options.sizes, options.seconds)
            show(order, found[order])
    ours, ring = found["rank order"]["counted"]["hierarchical"], {o: f["counted"]["ring"] for o, f in found.items()}
    for order, count in ring.items():
        print(f"\nhierarchical sends {ours / count:.3f} of the bytes of a ring in {order}", end="")
    print()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(*sys.argv[2:6], int(sys.argv[6]))
    else:
        main()
