"""What others wrote is read into structures; whatever is wrong with it is one line that names file, field and value."""

import json

import pytest
from msgspec import to_builtins

from parity.decoding import convert, decode
from parity.errors import UsageError
from parity.results.row import Row

ROW = {"case": "c", "family": "f", "implementation": "i", "dtype": "fp32", "device": "cpu", "verdict": "agree"}
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
    row = Row(**ROW, cls="logic", minimised=True)
    assert convert(Row, to_builtins(row), "F") == row
