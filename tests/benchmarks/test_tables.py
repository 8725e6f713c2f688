import shutil

import pytest


def test_the_tables_are_those_of_the_results(script):
    for page in script.PAGES:
        text = page.read_text("utf-8")
        assert script.MARKED.search(text), page
        assert script.filled(text) == text, f"{page.name} differs from benchmarks/results; run benchmarks/tables.py"


def test_another_figure_is_another_table(script, tmp_path):
    for file in script.RESULTS.glob("*.csv"):
        shutil.copy(file, tmp_path)
    file = tmp_path / "few_rows.csv"
    header, first, *rest = file.read_text().splitlines()
    file.write_text("\n".join([header, "1,10" + first[first.index(",", 2) :], *rest]) + "\n")
    text = "before\n<!-- table: few rows -->\nold\n<!-- end of table -->\nafter\n"
    made = script.filled(text, tmp_path)
    assert made.startswith("before\n") and made.endswith("after\n") and "old" not in made
    assert "| 1 | 10.0 (1.00×) |" in made and made != script.filled(text)


def test_a_table_that_nobody_makes_is_an_error(script):
    with pytest.raises(KeyError):
        script.filled("<!-- table: none -->\n<!-- end of table -->\n")
