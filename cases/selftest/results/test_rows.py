"""The results file: strict, written as it goes, readable after a kill, and one line of error where it is not."""

import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest
from msgspec import UNSET, convert
from msgspec.structs import replace

from parity.errors import UsageError
from parity.results.header import About, Header
from parity.results.report.rows import read, writer
from parity.results.row import Row

HEADER = Header(run="r1", header=About(seed=3))
OBJECT = {
    "schema": 1,
    "run": "r1",
    "case": "policy-1",
    "family": "policy",
    "implementation": "lib.loss",
    "quantity": "loss",
    "dtype": "fp32",
    "device": "cpu",
    "verdict": "agree",
    "settings": {"B": 1},
    "gates": {"scalar": 0.1},
    "worst": [],
    "message": "π",
}
ROW = convert(OBJECT, Row)


def write(path, *rows, **options):
    with writer(path, **options) as add:
        for row in rows:
            add(row)


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "new" / "results.ndjson"
    write(path, HEADER, ROW, replace(ROW, quantity="kl"))
    header, rows = read(path)
    assert header == HEADER
    assert rows == [ROW, replace(ROW, quantity="kl")]


def test_a_row_is_in_the_file_before_the_next_is_made(tmp_path):
    path = tmp_path / "results.ndjson"
    with writer(path) as add:
        add(HEADER)
        add(ROW)
        assert read(path)[1] == [ROW]


def test_a_new_run_replaces_the_file(tmp_path):
    path = tmp_path / "results.ndjson"
    write(path, HEADER, ROW)
    write(path, HEADER)
    assert read(path) == (HEADER, [])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), [0.0, float("-inf")], {"norm": float("nan")}])
def test_no_nan_and_no_infinity(tmp_path, value):
    path = tmp_path / "results.ndjson"
    with pytest.raises(ValueError, match=r"policy-1 lib\.loss loss: gates is not strict JSON"):
        write(path, HEADER, replace(ROW, gates=value))
    assert read(path) == (HEADER, []), "and the file stays readable"


@pytest.mark.parametrize("cut", [1, 40, 200])
def test_a_half_written_last_line_is_dropped_and_said(tmp_path, cut):
    path = tmp_path / "results.ndjson"
    write(path, HEADER, ROW, replace(ROW, case="policy-2"))
    path.write_bytes(path.read_bytes()[: -cut - 1])
    header, rows = read(path)
    assert rows == [ROW]
    assert header.interrupted is True


def test_a_cut_within_a_character(tmp_path):
    path = tmp_path / "results.ndjson"
    write(path, HEADER)
    path.write_bytes(path.read_bytes() + b'{"case": "\xcf')
    assert read(path)[0].interrupted is True


def test_a_last_line_without_its_break_counts(tmp_path):
    path = tmp_path / "results.ndjson"
    write(path, HEADER, ROW)
    path.write_bytes(path.read_bytes()[:-1])
    assert read(path) == (HEADER, [ROW])


def test_append_goes_on_after_a_kill(tmp_path):
    path = tmp_path / "results.ndjson"
    write(path, HEADER, ROW, ROW)
    path.write_bytes(path.read_bytes()[:-30])
    write(path, replace(ROW, case="policy-9"), append=True)
    header, rows = read(path)
    assert [r.case for r in rows] == ["policy-1", "policy-9"]
    assert header.interrupted is UNSET


def test_a_killed_process_keeps_what_it_had(tmp_path):
    path = tmp_path / "results.ndjson"
    code = f"""
        from parity.results.report.rows import writer
        with writer({str(path)!r}) as add:
            add({HEADER.to_json()!r})
            while True:
                add({OBJECT!r})
                print(flush=True)
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, cwd=os.getcwd())
    for _ in range(50):
        process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    header, rows = read(path)
    assert header.run == "r1"
    assert len(rows) >= 50
    assert all(row == ROW for row in rows)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 2: not a JSON object"),
        ("[1]", "line 2: Expected `object`, got `array`"),
        (json.dumps(OBJECT | {"verdict": "fine"}), "line 2: Invalid enum value 'fine' - at `$.verdict`"),
        (json.dumps(OBJECT | {"case": 3}), "line 2: Expected `str`, got `int` - at `$.case`"),
        (json.dumps(OBJECT | {"settings": None}), "line 2: Expected `object`, got `null` - at `$.settings`"),
        (json.dumps(OBJECT).replace("0.1", "NaN"), "line 2: NaN is not strict JSON"),
    ],
)
def test_a_malformed_line_is_named(tmp_path, line, says):
    path = tmp_path / "results.ndjson"
    path.write_text(f"{json.dumps(HEADER.to_json())}\n{line}\n{json.dumps(OBJECT)}\n")
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
        (json.dumps(HEADER.to_json() | {"schema": 2}) + "\n", "line 1: schema 2 is not readable here"),
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
    with pytest.raises(UsageError, match="cannot be written"), writer(tmp_path):
        pass
