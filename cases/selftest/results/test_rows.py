"""The results file: strict, written as it goes, readable after a kill, and one line of error where it is not."""

import json
import re
from pathlib import Path
from typing import get_args

import pytest
from msgspec import convert, to_builtins
from msgspec.structs import fields, replace

from parity.errors import UsageError
from parity.results.report.rows import Writer, read
from parity.results.row import DECLINED, FAILING, JUDGED, STOPPED, About, End, Header, Row, Verdict

PAGE = Path(__file__).parents[3] / "docs" / "results.md"
HEADER = Header(run="r1", header=About(seed=3))
OBJECT = {"run": "r1", "case": "policy-1", "family": "policy", "implementation": "lib.loss", "quantity": "loss"}
OBJECT |= {"dtype": "fp32", "device": "cpu", "verdict": "agree", "settings": {"B": 1}, "gates": {"scalar": 0.1}}
OBJECT |= {"worst": [], "message": "π"}
ROW = convert(OBJECT, Row)


def write(path, *rows, **options):
    with Writer(path, **options) as add:
        for row in rows:
            add(row)


def test_a_comparison_is_in_the_file_before_the_next_begins(tmp_path):
    path = tmp_path / "results.ndjson"
    with Writer(path) as add:
        for number in range(3):
            rows = [replace(ROW, implementation=f"lib.{number}", quantity=name) for name in ("loss", "kl")]
            for row in (HEADER, *rows) if not number else rows:
                add(row)
            assert len(read(path)[1]) == 2 * number


OTHER = {"case": "policy-2", "settings": {"B": 2}, "seed": 1, "features": {"one token": True}, "shard": "a"}
OTHER |= {
    "frozen": "f.json",
    "dtype": "bf16",
    "implementation": "lib.other",
    "role": "reference",
    "against": "lib.plain",
}
OTHER |= {"recipe": "fp32", "minimised": True, "replay": "parity replay f.json"}
OTHER |= {"unjudged": ["x"]}


@pytest.mark.parametrize("name", OTHER)
def test_rows_are_read_as_they_were_written_however_they_alternate(tmp_path, name):
    path, other = tmp_path / "results.ndjson", replace(ROW, quantity="kl", **{name: OTHER[name]})
    replayed = replace(ROW, replay=f"parity replay {ROW.case} --implementation {ROW.implementation}")
    rows = [ROW, other, ROW, replayed, other]
    write(path, HEADER, *rows)
    assert read(path)[1] == rows


def test_a_case_is_written_once_and_a_comparison_has_its_quantities_within(tmp_path):
    path = tmp_path / "results.ndjson"
    write(path, HEADER, *(replace(ROW, implementation=i, quantity=q) for i in ("a", "b") for q in ("loss", "kl")))
    case, *comparisons = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    assert case == {"case": "policy-1", "family": "policy", "dtype": "fp32", "device": "cpu", "settings": {"B": 1}}
    found = {c["implementation"]: [q["quantity"] for q in c["quantities"]] for c in comparisons}
    assert found == {"a": ["loss", "kl"], "b": ["loss", "kl"]} and len(comparisons) == 2


SIZES = {"worst": [{"index": [0]}], "max_abs": 0.25, "allclose": True, "atol": 0.5, "rtol": 0.5, "value_reference": 1.0}


def test_only_what_fails_keeps_how(tmp_path):
    path, stated = tmp_path / "results.ndjson", {"against": "a", "recipe": "fp32", "features": {"kept": 3}}
    gates = {"gate": "norm", "headroom": 2.0, "gates": {"norm": 2.0, "max": 0.0}}
    wrong = replace(ROW, verdict="disagree", **gates, **stated, **SIZES)
    one, right, unsupported = replace(wrong, gates={"norm": 2.0}), {"verdict": "agree"}, {"verdict": "unsupported"}
    rows = [wrong, replace(wrong, **right), replace(wrong, **unsupported), one]
    write(path, HEADER, *(replace(row, features=row.features | {"false": False}) for row in rows))
    without = {f.name: f.default for f in fields(Row) if f.name in SIZES} | {"worst": []}
    unsupported |= {"against": None, "recipe": None}
    assert read(path)[1] == [wrong, replace(wrong, **right | without), replace(wrong, **unsupported | without), one]
    assert '"gates":{"norm":2.0}' not in path.read_text()


def test_the_line_for_pandas_on_the_page_gives_a_table_of_quantities(tmp_path, monkeypatch):
    pandas = pytest.importorskip("pandas")
    line = next(line for line in PAGE.read_text().splitlines() if "json_normalize" in line)
    (tmp_path / "reports").mkdir()
    rows = [ROW, replace(ROW, quantity="kl", headroom=0.5), replace(ROW, case="policy-2")]
    write(tmp_path / "reports" / "results.ndjson", HEADER, *rows)
    monkeypatch.chdir(tmp_path)
    table = eval(line.strip().removeprefix("table = "), {"pandas": pandas})
    found = [*zip(table["case"], table["implementation"], table["quantity"], strict=True)]
    assert found == [(row.case, row.implementation, row.quantity) for row in rows]
    assert table["headroom"].max() == 0.5


@pytest.mark.parametrize("value", [float("nan"), float("inf"), [0.0, float("-inf")], {"norm": float("nan")}])
def test_no_nan_and_no_infinity(tmp_path, value):
    path = tmp_path / "results.ndjson"
    with pytest.raises(ValueError, match="not JSON compliant"):
        write(path, HEADER, replace(ROW, gates=value))
    assert read(path) == (HEADER, []), "and the file stays readable"


@pytest.mark.parametrize("cut", [1, 40, 200])
def test_a_half_written_last_line_is_dropped_and_said(tmp_path, cut):
    path = tmp_path / "results.ndjson"
    write(path, HEADER, ROW, replace(ROW, case="policy-2", message=200 * "π"))
    path.write_bytes(path.read_bytes()[: -cut - 1])
    header, rows = read(path)
    assert rows == [ROW]
    assert header.interrupted is True


def test_a_cut_within_a_character(tmp_path):
    path = tmp_path / "results.ndjson"
    write(path, HEADER)
    path.write_bytes(path.read_bytes() + b'{"case": "\xcf')
    assert read(path)[0].interrupted is True


def comparison(**changed):
    """The lines of a case and of a comparison on it."""
    told = OBJECT | changed
    case = {name: told[name] for name in ("case", "family", "dtype", "device", "settings")}
    quantity = {name: told[name] for name in ("quantity", "verdict", "gates")}
    return "\n".join(map(json.dumps, (case, {"case": "policy-1", "implementation": "x", "quantities": [quantity]})))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 2: not readable JSON"),
        ("[1]", "line 2: Expected `object`, got `array`"),
        (comparison(verdict="fine"), "line 3: Invalid enum value 'fine' - at `$.verdict`"),
        (comparison(dtype=3), "line 3: Expected `str`, got `int` - at `$.dtype`"),
        (comparison(settings=None), "line 3: Expected `object`, got `null` - at `$.settings`"),
        ('{"case": "policy-9", "quantities": []}', "line 2: a comparison on case policy-9, of which no line before"),
        ('{"case": ["policy-9"], "quantities": []}', "line 2: Expected `str`, got `array`"),
        ('{"settings": {}}', "line 2: Expected `str`, got `null`"),
        (comparison().replace("0.1", "NaN"), "line 3: not readable JSON"),
    ],
)
def test_a_malformed_line_is_named(tmp_path, line, says):
    path = tmp_path / "results.ndjson"
    path.write_text(f"{json.dumps(to_builtins(HEADER))}\n{line}\n{comparison()}\n")
    with pytest.raises(UsageError) as caught:
        read(path)
    assert says in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no header row"),
        ('{"sch', "no header row"),
        (json.dumps(OBJECT) + "\n", "line 1: expected the header row"),
        (json.dumps(to_builtins(HEADER) | {"schema": 1}) + "\n", "line 1: schema 1 is not readable here"),
    ],
)
def test_a_file_without_its_header(tmp_path, text, says):
    path = tmp_path / "results.ndjson"
    path.write_text(text)
    with pytest.raises(UsageError, match=says):
        read(path)


def test_no_file(tmp_path):
    with pytest.raises(UsageError, match="no such results file"):
        read(tmp_path / "none.ndjson")
    with pytest.raises(UsageError, match="cannot be written"), Writer(tmp_path):
        pass


INNER = {"interrupted", "parts", "asked", "plan", "seconds"}


def test_the_page_says_what_each_field_holds_and_no_more():
    told = re.findall(r"^- `(.+?)`.*: \S", PAGE.read_text(), re.MULTILINE)
    there = {field.encode_name for kind in (Header, About, End, Row) for field in fields(kind)}
    assert set(told) == there - INNER - {"end"}


def test_each_verdict_is_agreement_or_in_one_of_the_sets():
    assert set(get_args(Verdict)) == {*JUDGED, *STOPPED, *DECLINED}
    assert set(FAILING) == {*JUDGED, *STOPPED} - {"agree"}
    page = PAGE.read_text().split("## Verdicts")[1]
    assert all(", ".join(names) in page for names in (JUDGED, STOPPED, DECLINED, FAILING))
