"""What others wrote is read into structures; whatever is wrong with it is one line that names file, field and value."""

import json
from typing import Any

import pytest

from parity.decoding import convert, decode, toml_of
from parity.errors import UsageError
from parity.results.ledger import Ledger
from parity.results.row import Row
from parity.versions import history

ROW = {"case": "c", "family": "f", "implementation": "i", "dtype": "fp32", "device": "cpu", "verdict": "agree"}
CASE = {"schema": 1, "family": "logprobs", "seed": 1, "dtype": "fp32", "settings": {}}
ENTRY = {
    "id": "x",
    "family": "logprobs",
    "implementations": ["a.b"],
    "quantities": ["loss"],
    "reason": "r",
    "link": "l",
}
ENTRY |= {"date": "2026-11-22", "case": "x.json"}
DEEP = "[" * 100_000 + "]" * 100_000
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
        ({"verdict": '"fine"'}, "F: Invalid enum value 'fine' - at `$.verdict`"),
        ({"blame": '"me"'}, "F: Invalid enum value 'me' - at `$.blame`"),
        ({"headroom": '"1"'}, "F: Expected `float | null`, got `str` - at `$.headroom`"),
        ({"headroom": "true"}, "F: Expected `float | null`, got `bool` - at `$.headroom`"),
        ({"headroom": "1e999"}, "F: Number out of range"),
        ({"headroom": "9" * 400}, "F: Number out of range - at `$.headroom`"),
        ({"headroom": "NaN"}, "F: not readable JSON"),
        ({"seed": LONG}, "F: Integer value out of range"),
        ({"gates": '{"norm": "high"}'}, "F: Expected `float | null`, got `str` - at `$.gates[...]`"),
        ({"worst": "[3]"}, "F: Expected `object`, got `int` - at `$.worst[0]`"),
        ({"settings": DEEP}, "F: Expected `object`, got `array` - at `$.settings`"),
        ({"worst": f'[{{"x": {DEEP}}}]'}, "F: nested too deeply"),
    ],
)
def test_a_row(written, says):
    assert refused(decode, Row, text(ROW, **written), "F").startswith(says)
    assert refused(decode, Row, text(ROW, **written).encode(), "F").startswith(says)


def test_a_row_without_a_mandatory_field_and_one_of_a_later_release():
    for name in ROW:
        assert (
            refused(decode, Row, json.dumps({k: v for k, v in ROW.items() if k != name}), "F")
            == f"F: Object missing required field `{name}`"
        )
    assert decode(Row, json.dumps(ROW | {"of a later release": [1]}), "F") == Row(**ROW)
    assert decode(Row, json.dumps(ROW | {"class": "logic"}), "F").cls == "logic"
    assert convert(Row, Row(**ROW, cls="logic", minimised=True).to_json(), "F") == Row(
        **ROW, cls="logic", minimised=True
    )


def toml(values: dict) -> str:
    return "\n".join(f"{name} = {value if name == 'settings' else json.dumps(value)}" for name, value in values.items())


def test_a_ledger_with_a_misspelt_table_or_no_list(tmp_path):
    path = tmp_path / "ledger.toml"
    path.write_text("[[findings]]\n" + toml(ENTRY))
    assert "Object contains unknown field `findings`" in refused(Ledger.load, path)
    path.write_text("finding = 3")
    assert "Expected `array`, got `int` - at `$.finding`" in refused(Ledger.load, path)


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
        ({"bad": [" "]}, "Expected `str` matching regex"),
        ({"good": "2"}, "Expected `array`, got `str` - at `$.good`"),
        ({"then": "crashed"}, "Invalid enum value 'crashed' - at `$.then`"),
        ({"quantities": [1]}, "Expected `str`, got `int` - at `$.quantities[0]`"),
    ):
        (tmp_path / "history" / "x.toml").write_text(toml(fields | changed))
        assert f"x.toml: {says}" in refused(history.load)


def test_what_is_neither_json_nor_toml():
    assert refused(decode, Any, "{", "F").startswith("F: not readable JSON: ")
    assert refused(decode, Any, b"\xff", "F").startswith("F: not readable JSON: ")
    assert refused(toml_of, "=", "F", "record").startswith("F: not a readable record: ")
    assert refused(decode, Row, "[1]", "F") == "F: Expected `object`, got `array`"
