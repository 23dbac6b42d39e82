"""Tables and charts as data."""

from types import SimpleNamespace as Row

from kakeya.bench.tables import Column, Series, Table, figure, figures, listing, over


def test_numbers_are_scaled_and_text_stands_as_it_is() -> None:
    told = [figure(value, 1000, ",.1f") for value in (1.5, None, "x", True, False)]
    assert told == ["1,500.0", "–", "x", "yes", "no"]
    assert figures(0.001, None, scale=1000, form=".2f") == "1.00 / –"


def test_a_cell_is_a_path_of_attributes_or_what_a_call_gives() -> None:
    rows = [Row(name="a", more=Row(count=2)), Row(name="b", more=None)]
    columns = [
        Column("name", "name"),
        Column("count", "more.count", 10, ".1f", "x"),
        Column("call", lambda row: len(row.name) / 4),
        Column("none", lambda row: None, unit="x"),
    ]
    table = Table("t", columns, rows)
    assert table.headings == ["name", "count", "call", "none"]
    assert table.cells == [["a", "20.0x", "0", "–"], ["b", "–", "0", "–"]]
    plain = listing("t", ("what", "n"), [("row", 1234)])
    assert (plain.cells, plain.labels, listing("t", ("what", "n"), [], labels=1).labels) == (
        [["row", "1,234"]],
        2,
        1,
    )


def test_figures_of_rows_become_lines() -> None:
    rows = [Row(n=1.0, more=None), Row(n=None, more=Row(count=2))]
    series = {"n": "n", "count": lambda row: row.more and row.more.count}
    chart = over("t", "ms", "x", ["a", "b"], rows, series, 1000, bars=True)
    assert chart.series == [Series("n", [1000.0, None]), Series("count", [None, 2000])]
    assert chart.bars
    assert not chart.numeric
