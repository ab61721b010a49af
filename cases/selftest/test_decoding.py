"""What others wrote is read into structures; whatever is wrong with it is one line that names file, field and value."""

import json

import pytest

from parity.case.case import Case, Frozen
from parity.decoding import NESTED, convert, decode, json_of, toml_of
from parity.errors import UsageError
from parity.results.ledger import Ledger
from parity.results.row import Row
from parity.versions.commands import history

ROW = {"case": "c", "family": "f", "implementation": "i", "dtype": "fp32", "device": "cpu", "verdict": "agree"}
CASE = {"schema": 1, "family": "logprobs", "seed": 1, "dtype": "fp32", "settings": {}}
ENTRY = {
    "id": "x",
    "family": "logprobs",
    "implementations": ["a.b"],
    "quantities": ["loss"],
    "reason": "r",
    "link": "l",
    "date": "2026-11-22",
    "case": "x.json",
}
DEEP = "[" * 100_000 + "]" * 100_000
HALF_DEEP = "[" * (NESTED + 1) + "]" * (NESTED + 1)
LONG = "9" * 5000


def refused(call, *arguments) -> str:
    with pytest.raises(UsageError) as error:
        call(*arguments)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400
    return str(error.value)


def text(values: dict, **written: str) -> str:
    """JSON of `values` with fields beside them as they are written."""
    return json.dumps(values)[:-1] + "".join(f', "{name}": {value}' for name, value in written.items()) + "}"


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ({"verdict": '"fine"'}, "F: verdict 'fine' is unknown, choose from agree, "),
        ({"blame": '"me"'}, "F: blame 'me' is unknown"),
        ({"headroom": '"1"'}, "F: headroom must be a number or null, got '1'"),
        ({"headroom": "true"}, "F: headroom must be a number or null, got True"),
        ({"headroom": "1e999"}, "F: 1e999 is too large for a number"),
        ({"headroom": "9" * 400}, "F: headroom: number out of range, got 999"),
        ({"headroom": "NaN"}, "F: NaN is not strict JSON"),
        ({"seed": LONG}, "F: Exceeds the limit"),
        ({"gates": '{"norm": "high"}'}, "F: gates must be a number or null, got {'norm': 'high'}"),
        ({"worst": "[3]"}, "F: worst[0] must be a dict, got 3"),
        ({"settings": DEEP}, "F: nested too deeply"),
        ({"settings": f'{{"lengths": {HALF_DEEP}}}'}, "F: nested too deeply"),
    ],
)
def test_a_row(written, says):
    assert refused(decode, Row, text(ROW, **written), "F").startswith(says)
    assert refused(decode, Row, text(ROW, **written).encode(), "F").startswith(says)


def test_a_row_without_a_mandatory_field_and_one_of_a_later_release():
    for name in ROW:
        assert (
            refused(decode, Row, json.dumps({k: v for k, v in ROW.items() if k != name}), "F")
            == f"F: {name} is mandatory"
        )
    assert decode(Row, json.dumps(ROW | {"of a later release": [1]}), "F") == Row(**ROW)
    assert decode(Row, json.dumps(ROW | {"class": "logic"}), "F").cls == "logic"
    assert convert(Row, Row(**ROW, cls="logic", minimised=True).to_json(), "F") == Row(
        **ROW, cls="logic", minimised=True
    )


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (json.dumps(CASE | {"dtype": "fp8"}), "dtype 'fp8' is unknown, choose from bf16, fp16, fp32, fp64"),
        (json.dumps(CASE | {"settings": []}), "settings must be a dict, got []"),
        (json.dumps(CASE | {"tensors": 3}), "tensors must be a text or null, got 3"),
        (json.dumps(CASE | {"schema": True}), "schema True is not readable here, expected 1"),
        (json.dumps({k: v for k, v in CASE.items() if k != "schema"}), "schema is mandatory"),
        (json.dumps({"case": CASE | {"seed": 1.5}}), "seed must be a whole number, got 1.5"),
        (json.dumps({"case": 3}), "case must be a dict, got 3"),
        (json.dumps({"case": CASE, "implementations": "a.b"}), "implementations must be a list or null, got 'a.b'"),
        (json.dumps({"case": CASE, "implementation": 3}), "implementation must be a text or null, got 3"),
        (text(CASE, settings=f'{{"V": {LONG}}}'), "Exceeds the limit"),
        (text(CASE, settings='{"V": 1e999}'), "1e999 is too large"),
        (text(CASE, settings=DEEP), "nested too deeply"),
        (text(CASE, settings=f'{{"V": {HALF_DEEP}}}'), "nested too deeply"),
    ],
)
def test_a_case(tmp_path, content, says):
    path = tmp_path / "x.json"
    path.write_text(content)
    for read in (Frozen.load, Case.load):
        assert refused(read, path).startswith(f"{path}: {says}")


def toml(values: dict) -> str:
    return "\n".join(f"{name} = {value if name == 'settings' else json.dumps(value)}" for name, value in values.items())


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"implementations": "a.b"}, "x: implementations must be a list, got 'a.b'"),
        ({"quantities": []}, "x: quantities is mandatory, got []"),
        ({"reason": ""}, "x: reason is mandatory, got ''"),
        ({"verdicts": ["wrong"]}, "x: verdicts[0] 'wrong' is unknown, choose from agree, "),
        ({"settings": "{ V = { mn = 5 } }"}, "x: settings.V: 'mn' is unknown, choose from min, max, not"),
        ({"settings": f"{{ V = {HALF_DEEP} }}"}, " nested too deeply"),
        ({"settings": f"{{ V = {DEEP} }}"}, " nested too deeply"),
        ({"settings": f"{{ V = {LONG} }}"}, " not a readable ledger: Exceeds the limit"),
        ({"colour": 1}, "x: 'colour' is unknown, choose from id, family, "),
    ],
)
def test_a_ledger_entry(tmp_path, changed, says):
    (tmp_path / "x.json").write_text(json.dumps(CASE))
    path = tmp_path / "ledger.toml"
    path.write_text("[[finding]]\n" + toml(ENTRY | changed))
    assert f"{path}: {says.strip()}" in refused(Ledger.load, path)


def test_a_ledger_with_a_misspelt_table_or_no_list(tmp_path):
    path = tmp_path / "ledger.toml"
    path.write_text("[[findings]]\n" + toml(ENTRY))
    assert "'findings' is unknown, choose from finding" in refused(Ledger.load, path)
    path.write_text("finding = 3")
    assert "finding must be a list, got 3" in refused(Ledger.load, path)


def test_a_scope_by_class(tmp_path):
    (tmp_path / "x.json").write_text(json.dumps(CASE))
    path = tmp_path / "ledger.toml"
    path.write_text("[[finding]]\n" + toml(ENTRY | {"class": "precision"}))
    row = Row(**ROW | {"family": "logprobs", "implementation": "a.b", "verdict": "disagree"}, quantity="loss")
    for cls, known in (("precision", "x"), ("logic", None)):
        row.cls = cls
        assert Ledger.load(path).match(row, {}) == known


def test_a_history_record(tmp_path, monkeypatch):
    monkeypatch.setattr(history.data, "cases_dir", lambda: tmp_path)
    (tmp_path / "history").mkdir()
    (tmp_path / "history" / "x.json").write_text(json.dumps(CASE))
    fields = {"what": "w", "package": "trl", "bad": ["1"], "good": ["2"], "case": "x.json", "implementation": "a.b"}
    for changed, says in (
        ({"bad": [" "]}, "bad[0]: expected"),
        ({"good": "2"}, "good must be a list, got '2'"),
        ({"then": "crashed"}, "then 'crashed' is unknown, choose from agree, refused"),
        ({"quantities": [1]}, "quantities[0] must be a text, got 1"),
    ):
        (tmp_path / "history" / "x.toml").write_text(toml(fields | changed))
        assert f"x.toml: {says}" in refused(history.load)


def test_what_is_neither_json_nor_toml():
    assert refused(json_of, "{", "F").startswith("F: not a JSON object: ")
    assert refused(json_of, b"\xff", "F") == "F: not UTF-8"
    assert refused(toml_of, "=", "F", "record").startswith("F: not a readable record: ")
    assert refused(decode, Row, "[1]", "F") == "F: a row is a JSON object, got list"
