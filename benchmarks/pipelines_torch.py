"""PyTorch's pipeline schedules over Gloo on the transformer of `pipelines.py`, which starts this; runs in .venv-peers."""

import argparse
import json
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from blocks import BLOCKS, HEADS, LEARNING_RATE, WIDTH, arrays
from torch import distributed
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
ALONE = 4  # micro-batches without communication


def join() -> int:
    """Joins the other process, pins this one to a core, and returns its rank."""
    job = json.loads(os.environ["TF_CONFIG"])
    workers, rank = job["cluster"]["worker"], job["task"]["index"]
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"tcp://{workers[0]}", rank=rank, world_size=len(workers))
    return rank


def stage_of(blocks: int) -> torch.nn.Module:
    """Returns a stage of some blocks, which are those of the Keras model."""
    torch.manual_seed(0)
    block = {"dropout": 0.0, "batch_first": True, "norm_first": True}
    return torch.nn.Sequential(
        *(torch.nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, **block) for _ in range(blocks))
    )


def timed(step: Callable[[], None]) -> float:
    """Returns the seconds of a step that both ranks begin together."""
    distributed.barrier()
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def slowest(seconds: float) -> float:
    """Returns the most of both ranks."""
    value = torch.tensor([seconds])
    distributed.all_reduce(value, distributed.ReduceOp.MAX)
    return value.item()


def measure(rank: int, micro_batches: int, names: list[str], rounds: int) -> dict[str, Any]:
    """Measures schedules in turn, and forward and backward passes without communication."""
    module = stage_of(BLOCKS // 2)
    optimizer = torch.optim.SGD(module.parameters(), LEARNING_RATE)
    x, y = map(torch.from_numpy, arrays(micro_batches))
    parts = list(zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True))
    loss = torch.nn.MSELoss()
    sides = {
        name: SCHEDULES[name](PipelineStage(module, rank, 2, torch.device("cpu")), micro_batches, loss_fn=loss)
        for name in names
        if name in SCHEDULES
    }

    def step(name: str) -> None:
        optimizer.zero_grad()
        sides[name].step(x) if rank == 0 else sides[name].step(target=y)
        optimizer.step()

    def compute() -> None:
        for number in range(ALONE):
            part, target = parts[number % micro_batches]
            loss(module(part.clone().requires_grad_(rank == 1)), target).backward()

    for name in sides:
        step(name)
    compute()
    own, seconds = {"together": [], "alone": []}, {name: [] for name in sides}
    for _ in range(rounds):
        own["together"].append(slowest(timed(compute)) / ALONE)
        own["alone"].append(slowest(timed(lambda: compute() if rank == 0 else None)) / ALONE)
        for name in sides:
            seconds[name].append(slowest(timed(lambda name=name: step(name))))
    return {"micro_batches": micro_batches, **own, "steps": seconds}


def main(given: argparse.Namespace) -> None:
    """Measures each number of micro-batches; the first rank prints results."""
    rank = join()
    for micro_batches in map(int, given.micro_batches.split(",")):
        found = measure(rank, micro_batches, given.schedules.split(","), given.rounds)
        if rank == 0:
            print("RESULT " + json.dumps(found), flush=True)
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", default="gpipe,1f1b")
    parser.add_argument("--micro_batches", default="2,4,8,16")
    parser.add_argument("--rounds", type=int, default=3)
    main(parser.parse_known_args()[0])
