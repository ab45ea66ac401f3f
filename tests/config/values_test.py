"""Values of flags as text: what each accepts and how it writes it, and what it refuses in one line."""

import numpy as np
import pytest

from tfdist.cluster.topology import parse_topology
from tfdist.config.all_reduce import (
    ALGORITHMS,
    MAX_MESSAGE_BYTES,
    AlgorithmTable,
    AllReduce,
    Band,
    parse_all_reduce,
    parse_table,
)
from tfdist.config.balance import Balance, parse_balance
from tfdist.config.decay import (
    Cosine,
    CosineRestarts,
    CustomDecay,
    Exponential,
    Linear,
    NoDecay,
    OneCycle,
    Plateau,
    Polynomial,
    Step,
    parse_decay,
)
from tfdist.config.monitor import Monitor, parse_early_stopping, parse_monitor
from tfdist.config.pipeline import (
    ZBH1,
    BalancedCut,
    GPipe,
    Interleaved,
    LayerCut,
    OneFOneB,
    PipeDream,
    TwoBW,
    parse_cut,
    parse_pipeline_schedule,
)
from tfdist.config.rules import has_gradient_method, is_auto, parse_rules, parse_specs
from tfdist.config.search import BatchSizeSearch, LearningRateSearch, parse_byte_size, parse_search
from tfdist.config.spec import Spec
from tfdist.config.sync import EASGD, DiLoCo, EveryStep, FedAvg, LocalSGD, PostLocalSGD, parse_sync
from tfdist.errors import InputError, byte_size

# By the function that reads them. What is written is read back as the same value.
WRITTEN = {
    parse_balance: [
        ("equal", Balance("equal")),
        ("measured", Balance("measured")),
        ("weights(2,1,1)", Balance("weights", (2.0, 1.0, 1.0))),
        (" weights( 2 , 0.5 ) ", Balance("weights", (2.0, 0.5))),
        ("weights(3)", Balance("weights", (3.0,))),
    ],
    parse_monitor: [
        ("val_accuracy", Monitor("val_accuracy")),
        ("val_auc(mode=max)", Monitor("val_auc", "max")),
        ("val_auc(mode='min')", Monitor("val_auc", "min")),
        ("loss(mode=auto)", Monitor("loss")),
    ],
    parse_early_stopping: [
        (
            "val_loss(patience=4, min_delta=0.01, mode=min)",
            Monitor("val_loss", "min", {"patience": 4, "min_delta": 0.01}),
        ),
        ("val_loss(min_delta=0)", Monitor("val_loss", args={"min_delta": 0})),
    ],
    parse_cut: [
        ("auto", BalancedCut("memory")),
        ("balanced(by=time)", BalancedCut("time")),
        (" balanced ( by='parameters' ) ", BalancedCut("parameters")),
        ("balanced()", BalancedCut("memory")),
        ("block_3", LayerCut(("block_3",))),
        (" body/block_3 , block_7 ", LayerCut(("body/block_3", "block_7"))),
    ],
    parse_pipeline_schedule: [
        ("gpipe", GPipe()),
        ("1f1b", OneFOneB()),
        ("1f1b()", OneFOneB()),
        ("interleaved", Interleaved(chunks=2)),
        ("interleaved(chunks=4)", Interleaved(chunks=4)),
        ("zb_h1", ZBH1()),
        ("pipedream", PipeDream()),
        ("pipedream(vertical_sync=True)", PipeDream(vertical_sync=True)),
        ("2bw", TwoBW()),
    ],
    parse_sync: [
        ("every_step", EveryStep()),
        ("local_sgd", LocalSGD(period=8)),
        ("local_sgd(period=3, state=averaged)", LocalSGD(period=3, state="averaged")),
        ("post_local_sgd(warmup_steps=5)", PostLocalSGD(warmup_steps=5, period=8)),
        ("local_sgd(overlap=True)", LocalSGD(overlap=True)),
        ("diloco(fragments=4, delay=3, mixing=0.25)", DiLoCo(fragments=4, delay=3, mixing=0.25)),
        ("diloco(outer='adam(learning_rate=0.1)')", DiLoCo(period=50, outer="adam(learning_rate=0.1)")),
        ("easgd", EASGD(period=10)),
        ("easgd(period=4, alpha=0.1)", EASGD(period=4, alpha=0.1)),
        ("fedavg", FedAvg(clients=100, fraction=0.1, local_epochs=1, outer="sgd(learning_rate=1.0)")),
        (
            "fedavg(clients=8, shards_per_client=2, client_sizes=power_law)",
            FedAvg(clients=8, shards_per_client=2, client_sizes="power_law"),
        ),
        ("fedavg(proximal=0.01)", FedAvg(proximal=0.01)),
    ],
}
# These are read only; `--all_reduce` and `--decay` are kept as they are given.
READ = {
    parse_all_reduce: [
        *((name, AllReduce(name)) for name in ALGORITHMS),
        ("auto", AllReduce("auto")),
        ("auto(table='runs/a b/all_reduce.csv')", AllReduce("auto", "runs/a b/all_reduce.csv")),
        ("auto(table=runs/one/all_reduce.csv)", AllReduce("auto", "runs/one/all_reduce.csv")),
        ("auto( table = s3://bucket/x.csv )", AllReduce("auto", "s3://bucket/x.csv")),
    ],
    parse_decay: [
        ("none", NoDecay()),
        ("cosine", Cosine(0.0)),
        ("cosine(to=0.1)", Cosine(0.1)),
        ("linear(to=1)", Linear(1)),
        ("step(every=30)", Step(30, 0.1)),
        ("step(every=30, factor=0.5)", Step(30, 0.5)),
        ("cosine_restarts(first=10)", CosineRestarts(10, 2.0, 1.0, 0.0)),
        ("exponential", Exponential(0.01, 0)),
        ("exponential(every=10, factor=0.5)", Exponential(0.5, 10)),
        ("polynomial(to=0.1, power=2)", Polynomial(0.1, 2)),
        ("one_cycle(anneal=linear, pct_start=0.4)", OneCycle(0.4, anneal="linear")),
        ("plateau", Plateau("val_loss", "auto", 0.1, 10, 1e-4, 0, 0.0)),
        ("plateau(monitor=val_auc, mode=max, patience=2)", Plateau("val_auc", "max", patience=2)),
        ("plateau(monitor='loss')", Plateau("loss")),
        ("mine:rate(every=3)", CustomDecay(Spec("mine:rate", {"every": 3}))),
    ],
    parse_topology: [
        ("2,2", (2, 2)),
        ("1", (1,)),
        (" 2, 10 ", (2, 10)),
        *((text, None) for text in ("", "2,,2", "0,4", "-1", "4.0", "two", "²,2", "02", "1111111111")),
    ],
}
NOT_POSITIVE = ["weights", *(f"weights({args})" for args in ("", "2,", "2,-1", "2,nan", "1,inf", "a=1", "[2,1]"))]
NO_BALANCE = ("", "weights(2,1", "2,1", "weights(2,1", "equal()x")
# With a part of what is said; tests/cli/wrong_uses.tsv has more, as whole lines.
REFUSED = {
    parse_all_reduce: [
        ("ring(x=1)", 'ring has no parameter "x". Received: ring(x=1). Known: none.'),
        ("auto(tabel='x')", 'auto has no parameter "tabel". Received: auto(tabel=\'x\'). Did you mean "table"?'),
        ("auto(table=)", "table must be the name of a file. Received: ''."),
        ("auto(table='')", "table must be the name of a file. Received: ''."),
        ("", "expected a name"),
    ],
    parse_balance: [
        *((text, "must have a positive number for each replica") for text in NOT_POSITIVE),
        ("weights(1,1e-9)", "for each replica, at least 1e-06 of the largest, in the order of their ranks"),
        *((text, "is not known. ") for text in NO_BALANCE),
        *((text, "Known: equal, measured, weights(2,1,1)") for text in NO_BALANCE),
    ],
    parse_cut: [
        ("", "must be auto, balanced"),
        ("a,,b", "must be auto, balanced"),
        ("even(by=time)", "must be auto, balanced"),
    ],
    parse_decay: [
        ("exponential(factor=0)", "exponential: factor must be a number in (0, 1]. Received: 0."),
        ("cosine_restarts", "cosine_restarts needs a value for first."),
        (
            "cosine_restarts(first=9, t_mul=0.5)",
            "cosine_restarts: t_mul must be 1, or a number in [1.1, 1000]. Received: 0.5.",
        ),
        ("one_cycle(pct_start=1)", "one_cycle: pct_start must be a number in (0, 1). Received: 1."),
        ("one_cycle(div_factor=0.5)", "one_cycle: div_factor must be a number in [1, inf). Received: 0.5."),
        ("one_cycle(anneal=cos)", "one_cycle: anneal must be cosine or linear. Received: 'cos'."),
        ("one_cycle(cycle_momentum=0)", "cycle_momentum must be True or False. Received: 0."),
        ("plateau(monitor=3)", "plateau: monitor must be the name of a metric, such as val_loss. Received: 3."),
        ("linear(to=None)", "linear: to must be a number in [0, 1]. Received: None."),
        ("linear(to=True)", "linear: to must be a number in [0, 1]. Received: True."),
        ("step(every=2.5)", "at least 1. Received: 2.5."),
    ],
    parse_early_stopping: [
        ("", "expected a name"),
        ("a:b", "must begin with the name of a metric"),
        ("val_loss(patience=-1)", "patience must be an integer of at least 0. Received: -1"),
        ("val_loss(patience=1.5)", "patience must be an integer"),
        ("val_loss(min_delta=True)", "min_delta must be a number of at least 0"),
    ],
    parse_pipeline_schedule: [
        ("", "expected a name"),
        ("gpipe(chunks=2)", 'gpipe has no parameter "chunks".'),
        ("interleaved(2)", "expected key=value"),
        ("interleaved(chunks=2.0)", "at least 2. Received: 2.0."),
    ],
    parse_specs: [("a,b(", "column 2")],
    parse_sync: [
        ("local_sgd(period=2.5)", "local_sgd: period must be a number of steps, at least 1. Received: 2.5."),
        ("local_sgd(state=none)", "local_sgd: state must be local, averaged or reset. Received: 'none'."),
        ("local_sgd(period=4, delay=5)", "local_sgd: delay must be at most the period, 4 steps. Received: 5."),
        (
            "local_sgd(overlap=True, state=reset)",
            "state must be local if weights are not exchanged all at once. Received: reset.",
        ),
        (
            "diloco(period=10, fragments=3, delay=4)",
            "diloco: delay must be at most period / fragments, 3 steps. Received: 4.",
        ),
        ("diloco(period=3, fragments=4)", "diloco: fragments must be at most the period of 3 steps. Received: 4."),
        ("diloco(mixing=1.5)", "diloco: mixing must be a number in [0, 1]. Received: 1.5."),
        ("fedavg(client_sizes=random)", "fedavg: client_sizes must be equal or power_law. Received: 'random'."),
        ("fedavg(outer='adam')", "fedavg: outer must be an optimizer with its learning rate, such as "),
        ("diloco(outer=3)", "diloco: outer must be an optimizer with its learning rate, such as "),
        ("easgd(alpha='x')", "easgd: alpha must be a number in (0, 1). Received: 'x'."),
    ],
    parse_search: [
        ("learning_rate(start=1)", 'learning_rate has no parameter "start". Received: learning_rate(start=1). Known: '),
        ("learning_rate(min=1, max=0.1)", "learning_rate: min must be less than max. Received: min=1, max=0.1."),
        ("learning_rate(steps=9)", "learning_rate: steps must be a number of steps, at least 10. Received: 9."),
        ("batch_size(memory=0)", "Received: 0."),
        ("batch_size(memory=True)", "memory must be a number of bytes"),
    ],
    parse_rules: [(";", "names no method")],
}


def of_all(table):
    return [(parse, *row) for parse, rows in table.items() for row in rows]


@pytest.mark.parametrize(("parse", "text", "value"), of_all(WRITTEN))
def test_a_text_is_read_and_written_alike(parse, text, value):
    assert parse(text) == value
    assert parse(str(value)) == value
    assert str(parse(str(value))) == str(value)


@pytest.mark.parametrize(("parse", "text", "value"), of_all(READ))
def test_a_text_is_read(parse, text, value):
    assert parse(text) == value


@pytest.mark.parametrize(("parse", "text", "message"), of_all(REFUSED))
def test_other_texts_are_refused_in_one_line(parse, text, message):
    with pytest.raises(InputError) as error:
        parse(text)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_what_is_measured():
    """An algorithm without a table."""
    assert [text for text, _ in READ[parse_all_reduce] if parse_all_reduce(text).is_measured] == ["auto"]


TABLE = AlgorithmTable(
    (Band(0, 65536, "tree"), Band(65537, 2**20, "engine"), Band(2**20 + 1, MAX_MESSAGE_BYTES, "hierarchical"))
)


def test_a_table_is_read_as_it_was_written():
    text = TABLE.to_csv(["4.0 KiB: engine 1 ms"])
    assert text.splitlines() == [
        "# 4.0 KiB: engine 1 ms",
        "collective,min_bytes,max_bytes,algorithm",
        "allreduce,0,65536,tree",
        "allreduce,65537,1048576,engine",
        f"allreduce,1048577,{MAX_MESSAGE_BYTES},hierarchical",
    ]
    assert parse_table(text, "x.csv") == TABLE
    assert TABLE.algorithms == ("engine", "tree", "hierarchical")


def test_files_of_nccl_s_tuner_have_more_columns_and_collectives():
    text = "broadcast,0,32768,tree,simple,1,1,2\nallreduce,0,1024,ring,simple,2,1,2,-1,-1\n"
    assert parse_table(text, "x.csv").bands == (Band(0, 1024, "ring"),)


@pytest.mark.parametrize("size", [0, 1, 65536, 65537, 2**20, 2**20 + 1, MAX_MESSAGE_BYTES])
def test_the_algorithm_of_a_size(size):
    assert TABLE.algorithm_for(size) == ("tree" if size <= 65536 else "engine" if size <= 2**20 else "hierarchical")
    assert AlgorithmTable((Band(8, 16, "ring"),)).algorithm_for(size) == "engine", "sizes in no band"
    assert AlgorithmTable.uniform("ring").algorithm_for(size) == "ring"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "x.csv needs at least one line allreduce,MIN,MAX,ALGORITHM. Received no such line."),
        ("allreduce,0,x,ring", "x.csv, line 1: must be collective,min_bytes,max_bytes,algorithm, with sizes in bytes."),
        ("allreduce,0", "x.csv, line 1: must be collective,"),
        ("# a\nallreduce,0,9,rign", 'x.csv, line 2: rign is not an all-reduce algorithm. Did you mean "ring"?'),
        ("allreduce,0,9,ring\nallreduce,9,20,tree", "x.csv, line 2: Ranges of sizes must ascend and must not overlap."),
        ("allreduce,9,0,ring", "x.csv, line 1: Ranges of sizes must ascend"),
    ],
)
def test_what_is_not_a_table(text, message):
    with pytest.raises(InputError) as error:
        parse_table(text, "x.csv")
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (4, 4),
        ("4", 4),
        ("4B", 4),
        ("1k", 1024),
        ("64KB", 64 * 1024),
        ("64KiB", 64 * 1024),
        ("64kib", 64 * 1024),
        (" 1.5 MB ", 3 * 2**19),
        ("2GiB", 2**31),
        ("1TB", 2**40),
    ],
)
def test_units_are_powers_of_1024_with_and_without_i(text, count):
    assert parse_byte_size(text, "memory") == count


@pytest.mark.parametrize("text", ["64.0 KiB", "1.5 MiB", "2.0 GiB"])
def test_a_printed_size_is_parsed_as_the_same_size(text):
    assert byte_size(parse_byte_size(text, "memory")) == text


@pytest.mark.parametrize("size", [0, "0", "0.1", "", "-4KB", "4X", "4iB", "2 gigs", True, "MB", 1.5j, "1" * 19])
def test_errors_have_the_name_of_the_value(size):
    with pytest.raises(InputError) as error:
        parse_byte_size(size, "a size")
    assert str(error.value) == (
        "a size must be a number of bytes above 0, such as 512, 64KB or 2GiB; KB and KiB are 1024 bytes. "
        f"Received: {size!r}."
    )


@pytest.mark.parametrize(
    ("text", "chosen", "for_gradients"),
    [
        ("none", False, False),
        ("auto", True, False),
        ("auto(after=3, allow='fp16; powersgd(rank=4)')", True, False),
        ("signsgd", False, True),
        ("topk(ratio=0.1)|fp16", False, False),
        ("path=.*kernel: dgc(ratio=0.1); *: int8", False, True),
        ("size>=1000: int8; *: bf16", False, False),
        ("package.module:dgc", False, False),
    ],
)
def test_what_flags_ask_of_a_compression_without_tensorflow(text, chosen, for_gradients):
    rules = parse_rules(text)
    assert (is_auto(rules), has_gradient_method(rules)) == (chosen, for_gradients)


@pytest.mark.parametrize(
    "text", ["plateau(monitor='val_auc', mode='max')", "one_cycle(anneal='linear')", "mine:rate(mode=1)"]
)
def test_a_decay_is_normalized_to_the_common_grammar(text):
    assert str(parse_decay(text.replace("'", ""))) == str(parse_decay(text)) == text


@pytest.mark.parametrize(
    ("text", "expected", "normal"),
    [
        ("learning_rate", LearningRateSearch(), "learning_rate"),
        ("learning_rate(max=1, steps=50)", LearningRateSearch(max=1, steps=50), "learning_rate(max=1, steps=50)"),
        ("batch_size", BatchSizeSearch(), "batch_size"),
        ("batch_size(memory=2GiB)", BatchSizeSearch(memory=2**31), "batch_size(memory=2147483648)"),
        ("batch_size( memory = 1.5 MB )", BatchSizeSearch(memory=3 * 2**19), "batch_size(memory=1572864)"),
        ("batch_size(memory=1000)", BatchSizeSearch(memory=1000), "batch_size(memory=1000)"),
        (
            "batch_size(processes=2,launcher=horovod)",
            BatchSizeSearch(processes=2, launcher="horovod"),
            "batch_size(processes=2, launcher='horovod')",
        ),
    ],
)
def test_searches(text, expected, normal):
    assert parse_search(text) == parse_search(normal) == expected
    assert str(parse_search(text)) == normal


def test_numbers_of_numpy():
    assert str(LearningRateSearch(max=np.float64(1), steps=np.int64(50))) == str(LearningRateSearch(max=1.0, steps=50))
    assert str(BatchSizeSearch(max=np.int64(8))) == str(BatchSizeSearch(max=8))


@pytest.mark.parametrize(
    ("text", "sizes", "offsets", "delays", "kept"),
    [
        ("local_sgd", [9], [0], [0], None),
        ("local_sgd(period=1, overlap=True)", [9], [0], [1], None),
        ("local_sgd(period=8, overlap=True)", [9], [0], [8], None),
        ("local_sgd(period=8, overlap=True, delay=3)", [9], [0], [3], None),
        ("diloco", [9], [0], [0], 0.0),
        ("diloco(fragments=4)", [6, 3, 3, 0], [0, 12, 25, 37], [0, 0, 0, 0], 0.0),
        ("diloco(fragments=4, overlap=True, delay=7)", [6, 3, 3, 0], [0, 12, 25, 37], [7, 7, 7, 7], 0.5),
        ("diloco(fragments=4, overlap=True)", [3, 3, 3, 3], [0, 13, 25, 37], [13, 12, 12, 13], 0.5),
        ("diloco(fragments=4, overlap=True)", [6, 3, 3, 0], [0, 24, 36, 49], [24, 12, 13, 1], 0.5),
        ("diloco(period=4, fragments=4, overlap=True)", [9, 1, 1, 1], [0, 1, 2, 3], [1, 1, 1, 1], 0.5),
        ("diloco(delay=3, mixing=0)", [9], [0], [3], 0),
    ],
)
def test_when_fragments_are_sent_and_used(text, sizes, offsets, delays, kept):
    sync = parse_sync(text)
    assert sync.offsets(sizes) == offsets
    assert sync.delays(sync.offsets(sizes)) == delays
    assert sync.effective_mixing == kept


def test_the_examples_of_a_round():
    assert FedAvg().clients_per_round == 10
    assert FedAvg(clients=10, fraction=0.01).clients_per_round == 1
    assert FedAvg(local_epochs=5).examples_per_step(60000, 10) == 30000
    assert FedAvg(clients=3, fraction=1).examples_per_step(10, 4) == 10
    assert EveryStep().examples_per_step(60000, 10) == 10
