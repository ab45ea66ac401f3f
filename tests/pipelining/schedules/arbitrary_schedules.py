"""Hypothesis strategies for schedules."""

from hypothesis import strategies as st

from tfdist.pipelining.schedule import Action, Schedule, result_of
from tfdist.pipelining.schedule_catalog import make_schedule
from tfdist.pipelining.timeline import simulate


@st.composite
def named_schedules(draw: st.DrawFn) -> Schedule:
    """The schedules of `--pipeline_schedule`, over processes, micro-batches and chunks."""
    spec = draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "zb_h1"]))
    processes = draw(st.integers(1, 6))
    if spec == "interleaved":
        spec = f"interleaved(chunks={draw(st.integers(2, 4))})"
        return make_schedule(spec, processes, processes * draw(st.integers(1, 4)))
    return make_schedule(spec, processes, draw(st.integers(1, 12)))


@st.composite
def any_schedules(draw: st.DrawFn) -> Schedule:
    """Any order that can be executed: each process computes, in turn, any action whose results are there."""
    processes, chunks, micro_batches = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 5))
    stages, choose = processes * chunks, draw(st.randoms(use_true_random=False))
    kinds = [choose.choice(["FB", "FIW"]) for _ in range(stages)]
    left = [
        [Action(kind, v, m) for v in range(p, stages, processes) for m in range(micro_batches) for kind in kinds[v]]
        for p in range(processes)
    ]
    rows: list[list[Action]] = [[] for _ in range(processes)]
    schedule, done = Schedule("any", processes, stages, micro_batches, ()), set[Action]()
    while any(left):
        process = choose.choice([number for number, actions in enumerate(left) if actions])
        ready = [action for action in left[process] if done.issuperset(schedule.requirements(action))]
        if ready:
            action = choose.choice(ready)
            left[process].remove(action)
            rows[process].append(action)
            done.add(result_of(action))
    return Schedule("any", processes, stages, micro_batches, tuple(map(tuple, rows)))


def computes_a_batch(schedule: Schedule) -> bool:
    """Returns whether each stage computes each micro-batch once, in its process, and no action waits for another forever."""
    for stage in range(schedule.stages):
        row = [x for x in schedule.actions[schedule.process_of(stage)] if x.stage == stage]
        for m in range(schedule.micro_batches):
            if sorted(x.kind for x in row if x.micro_batch == m) not in (["B", "F"], ["F", "I", "W"]):
                return False
    spans = simulate(schedule, forward=1.0, backward=2.0).spans
    return [len(row) for row in spans] == [len(row) for row in schedule.actions]


def durations(count: int) -> st.SearchStrategy[list[float]]:
    """A number of seconds for each of several stages."""
    return st.lists(st.floats(0, 10), min_size=count, max_size=count)
