import csv

import typer
from typer.testing import CliRunner


def run(script, *options):
    app = typer.Typer()
    app.command()(script.main)
    return CliRunner().invoke(app, [str(option) for option in options])


def test_every_number_of_rows_is_timed_both_ways_and_recorded(script, tiny_folders, tmp_path):
    file = tmp_path / "few_rows.csv"
    result = run(script, "--target", tiny_folders / "target", "--rows", "2,5", "--repeats", 1, "--record", file)
    assert result.exit_code == 0, result.output
    rows = list(csv.DictReader(file.open()))
    assert [row["rows"] for row in rows] == ["1", "2", "5"]
    assert all(float(row["plain_ms"]) > 0 and float(row["few_ms"]) > 0 for row in rows)
    assert (
        {row["commit"] for row in rows} != {""}
        and rows[0]["torch"]
        and rows[0]["command"].startswith("python benchmarks/")
    )


def test_wrong_options_are_one_sentence(script, tmp_path):
    assert "expected whole numbers" in str(run(script, "--rows", "a").exception)
    assert "cannot be written" in str(run(script, "--record", tmp_path).exception)
