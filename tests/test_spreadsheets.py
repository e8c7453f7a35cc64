"""Tables as spreadsheets and other programs write them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from advbayes.cli import main
from advbayes.datasets import DataError, from_csv
from advbayes.datasets.tables import parse_table

Printed = pytest.CaptureFixture[str]


def csv_of(folder: Path, text: str) -> Path:
    path = folder / "t.csv"
    path.write_bytes(text.encode())
    return path


@pytest.mark.parametrize("mark", [";", "\t", "|"])
def test_decimal_commas_are_read_where_no_comma_divides_the_cells(
    tmp_path: Path, mark: str
) -> None:
    """As numbers, as targets, and beside text and gaps; to the same values as with points."""
    lines = ["a;word;gap;y"]
    lines += [f"{n},25;{'uv'[n % 2]};{'' if n % 4 else '1,5e1'};{n % 7},5" for n in range(20)]
    text = "\n".join(lines).replace(";", mark)
    with pytest.warns(UserWarning, match=r"decimal commas, such as '0,25' in column 'a'"):
        commas = from_csv(csv_of(tmp_path, text), "y", delimiter=mark)
    points = from_csv(csv_of(tmp_path, text.replace(",", ".")), "y", delimiter=mark)
    assert commas.task == "regression"
    assert commas.feature_names == points.feature_names
    assert torch.equal(commas.x_train, points.x_train)
    assert torch.equal(commas.y_test, points.y_test)
    with pytest.warns(UserWarning, match="decimal commas"):
        assert parse_table(b"a;b\n1,5;2\n", "t").numbers.tolist() == [[1.5, 2.0]]


def test_a_file_with_commas_and_points_is_refused(tmp_path: Path) -> None:
    """One of the two divides thousands, and nobody says which."""
    said = r"points, or decimal commas, in all numbers, got '(0,5|1\.250)' in column"
    for gap in ("", "1"):  # read as text, as numbers
        rows = "".join(f"{n},5;1.25{n};{n}\n" for n in range(9)) + f"1,5;1.250;{gap or 3}\n"
        with pytest.raises(DataError, match=said):
            from_csv(csv_of(tmp_path, "a;b;y\n" + rows + (";2.5;1\n" if not gap else "")), "y")


def test_a_comma_in_quotes_is_no_decimal_comma_where_commas_divide(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nothing between thousands"):
        from_csv(csv_of(tmp_path, 'a,y\n"1,234",2\n"2,345",3\n'), "y")


def test_words_with_commas_stay_words(tmp_path: Path) -> None:
    rows = "".join(f"{n};{('1,5', 'a,b', 'c')[n % 3]};{n % 2}\n" for n in range(12))
    assert "b=1,5" in from_csv(csv_of(tmp_path, "a;b;y\n" + rows), "y").feature_names


def test_a_quoted_cell_may_go_over_several_lines(tmp_path: Path) -> None:
    end = "\r\n"
    rows = [f'{n},"first{end}second ""{n % 2}""",{n % 3}' for n in range(12)]
    path = csv_of(tmp_path, end.join(['a,"a\nnote",y', *rows]) + end)
    assert from_csv(path, "y", drop=["a note"]).feature_names == ("a",)
    assert from_csv(path, "y").feature_names[1:] == tuple(
        f'a note=first second "{n}"' for n in (0, 1)
    )
    wrong = csv_of(tmp_path, 'a,b,y\n1,"x\ny",2\n1,2\n')
    with pytest.raises(DataError, match="3 cells in line 4, got 2"):  # of the file, not of the rows
        from_csv(wrong, "y")


@pytest.mark.parametrize("end", ["", "\n"])
def test_a_quote_that_is_never_closed_is_refused(tmp_path: Path, end: str) -> None:
    rows = "a,y\n1,2\n" + '"1,2\n' + "3,4\n" * 5 + "5,6" + end
    with pytest.raises(DataError, match="quote opened in line 3 closed, got the end of the file"):
        from_csv(csv_of(tmp_path, rows), "y")


def test_a_quote_does_not_swallow_a_large_file() -> None:
    rows = b'a,y\n"1,2\n' + b"3,4\n" * (1 << 19)
    with pytest.raises(DataError, match="in line 2"):
        parse_table(rows, "t.csv")


@pytest.mark.parametrize(
    ("known", "unknown", "task"),
    [
        (("1.5", "2.5"), ("", "NA", "?", "nan"), "regression"),
        (("ill", "well"), ("",), "classification"),
        (("0", "1"), ("",), "classification"),
    ],
)
def test_rows_without_a_target_are_left_out_and_counted(
    tmp_path: Path, known: tuple[str, str], unknown: tuple[str, ...], task: str
) -> None:
    for word in ("", "u,"):  # all numbers, or text besides
        cells = [known[n % 2] for n in range(20)]
        kept = [f"{n},{word}{cell}" for n, cell in enumerate(cells)]
        lost = [f"99,{word}{cell}" for cell in unknown]
        head = "a,b,y" if word else "a,y"
        path = csv_of(tmp_path, "\n".join([head, *lost, *kept]))
        with pytest.warns(UserWarning, match=rf"{len(lost)} of {20 + len(lost)} rows have no targ"):
            whole = from_csv(path, "y", task=task)
        alone = from_csv(csv_of(tmp_path, "\n".join([head, *kept])), "y", task=task)
        assert torch.equal(whole.x_train, alone.x_train)
        assert torch.equal(whole.y_test, alone.y_test)
        assert whole.class_names == alone.class_names


def test_a_mistyped_target_is_named_by_its_row_in_the_file(tmp_path: Path) -> None:
    path = csv_of(tmp_path, "a,y\n1,\n" + "2,3\n" * 9 + "3,7 kg\n")
    with (
        pytest.warns(UserWarning, match="1 of 11 rows have no target"),
        pytest.raises(DataError, match=r"got '7 kg' in row 11\. Fix it, leave it empty, or say"),
    ):
        from_csv(path, "y")


def test_all_columns_to_leave_out_are_named_at_once(tmp_path: Path) -> None:
    rows = "".join(f"{n},,w{n},2021-01-{n:02},{n}\n" for n in range(60))
    with pytest.raises(DataError) as refused:
        from_csv(csv_of(tmp_path, "a,void,name,day,y\n" + rows), "y")
    assert "values in 'void'; at most 50 different words in a text column, in 'name', 'day'" in str(
        refused.value
    )
    assert "--drop void,name,day (drop= in Python). Write amounts and dates as" in str(
        refused.value
    )
    assert from_csv(tmp_path / "t.csv", "y", drop=["void", "name", "day"]).feature_names == ("a",)


def test_numbers_too_small_for_float32_are_not_taken_for_a_constant(tmp_path: Path) -> None:
    rows = "".join(f"{n}e-300,{n},{n % 3}\n" for n in range(12))
    with pytest.raises(DataError, match=r"differ in float32 in column 'tiny'.*rescale it"):
        from_csv(csv_of(tmp_path, "tiny,a,y\n" + rows), "y")


def test_train_and_predict_on_a_spreadsheet_with_decimal_commas(
    tmp_path: Path, capsys: Printed
) -> None:
    rows = [f"{n % 10},5;{n % 3};{n % 10},0" for n in range(60)]
    path = csv_of(tmp_path, "\ufeff" + "\r\n".join(["Größe;n;Preis", *rows]))
    run = str(tmp_path / "run")
    flags = ["--data", str(path), "--target", "Preis", "--epochs", "1", "--quiet", "--out", run]
    with pytest.warns(UserWarning, match="decimal commas, such as '0,5' in column 'Größe'"):
        assert main(["train", *flags]) == 0
    (tmp_path / "new.csv").write_text("n;Größe\n1;3,5\n", encoding="utf-8")
    capsys.readouterr()
    with pytest.warns(UserWarning, match="decimal commas, such as '3,5' in column 'Größe'"):
        assert main(["predict", run, str(tmp_path / "new.csv"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)


def test_a_word_that_looks_like_a_number_is_saved_as_a_word(
    tmp_path: Path, capsys: Printed
) -> None:
    rows = [f"{n % 10},{('3.5', 'x', 'y')[n % 3]},{n % 4}" for n in range(30)]
    path, run = csv_of(tmp_path, "\n".join(["a,grade,y", *rows])), str(tmp_path / "run")
    flags = ["--data", str(path), "--target", "y", "--epochs", "1", "--quiet", "--out", run]
    assert main(["train", *flags]) == 0
    (tmp_path / "new.csv").write_text("a,grade\n1,3.5\n1,x\n")
    assert main(["predict", run, str(tmp_path / "new.csv")]) == 0
    assert "no known category" not in capsys.readouterr().err


def test_a_column_with_a_comma_in_its_name_can_be_named(tmp_path: Path, capsys: Printed) -> None:
    rows = [f"{n % 10},{n % 7},{n % 3},{n % 4}" for n in range(40)]
    path = csv_of(tmp_path, "\n".join(['a,"b, kg",c,"price, EUR"', *rows]))
    flags = ["--data", str(path), "--epochs", "1", "--quiet", "--json"]
    chosen = ["--target", '"price, EUR"', "--drop", 'a,"b, kg"', "--out", str(tmp_path / "run")]
    assert main(["train", *flags, *chosen]) == 0
    assert list(json.loads(capsys.readouterr().out)["threat_model"]["raw"]) == ["c"]
    assert main(["train", *flags, "--target", "price, EUR", "--out", str(tmp_path / "b")]) == 2
    assert "with a comma in it stands in double quotes" in capsys.readouterr().err
