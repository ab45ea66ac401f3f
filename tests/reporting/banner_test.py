from tfdist.reporting.banner import banner


def test_rows_are_aligned_wrapped_and_without_control_characters():
    path = "runs/" + "x" * 90
    rows = banner({"model": "mlp\x1b[2J", "chosen": "", "strategy": "word " * 20, "output": path})
    assert rows == [
        "model     mlp [2J",
        "strategy  " + ("word " * 13).rstrip(),
        "          " + ("word " * 7).rstrip(),
        f"output    {path}",
    ]


def test_no_description_is_no_line():
    assert banner({}) == []
