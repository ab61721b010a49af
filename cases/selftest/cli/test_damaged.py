"""Files that others wrote, damaged in 2,000 ways from a seed: read, or refused in one line; never a traceback."""

import json
import random
from pathlib import Path

import pytest

from parity import data
from parity.case.case import Case
from parity.errors import UsageError
from parity.registry import family
from parity.results.ledger import Ledger
from parity.results.report.rows import read
from parity.results.report.summary import summarise
from parity.sampling import find
from parity.versions import history

SEED, FILES = 20261122, 2000
ABSURD = [
    None, True, -1, 0, 10**30, 10**4299, 1e308, -0.0, "", "x" * 5000, "../../etc/passwd", "\u0000", "NaN", [], [[]], {},
    {"a": {}}, [1, "a", None], {"min": "a"}, {"not": []},
]  # fmt: skip
ROW = {
    "case": "logprobs-1", "family": "logprobs", "implementation": "a.b", "dtype": "fp32",
    "device": "cpu", "role": "reference", "verdict": "disagree", "quantity": "logps", "headroom": 2.0, "gates": {"row": 2.0},
    "worst": [{"index": [0, 1], "value": 1.0, "oracle": 2.0, "error": 1.0}], "settings": {"V": 3}, "class": "logic",
}  # fmt: skip
HEADER = {"schema": 2, "run": "aa", "header": {"versions": {"torch": "2"}, "device": "cpu", "profile": "pr", "seed": 1}}


def damaged(text: str, rng: random.Random) -> bytes:
    """One of nine damages: of bytes, of the syntax, or of a value."""
    raw = text.encode()
    at = rng.randrange(len(raw))
    of_bytes = [
        raw[:at],
        raw[:at] + rng.randbytes(rng.randrange(1, 9)) + raw[at:],
        raw[:at] + raw[at + rng.randrange(1, 20) :],
        raw[:at] + b"[" * rng.choice((5, 100_000)) + raw[at:],
        raw[:at] + b"9" * 5000 + raw[at:],
        rng.choice((b"", b"\xff\xfe", b"null", b"[]", b"{}", b'""', b"1", b"\n\n", b"NaN", b"[" * 100_000)),
    ]
    how = rng.randrange(len(of_bytes) + 3)
    if how < len(of_bytes):
        return of_bytes[how]
    lines = text.split("\n")
    number = rng.randrange(len(lines))
    try:
        value = json.loads(lines[number] if how > 6 else text)
    except ValueError:
        word = rng.choice(("= []", "= {}", "= 9999999999999999999999", '= "x"', "= [[1]]", "= true", "= 1979-05-27"))
        lines[number] = lines[number].partition("=")[0] + word
        return "\n".join(lines).encode()
    _replace(value, rng)
    told = json.dumps(value)
    return told.encode() if how == 6 else "\n".join([*lines[:number], told, *lines[number + 1 :]]).encode()


def _replace(value, rng: random.Random) -> None:
    """Somewhere inside, an absurd value, a key less or a key more."""
    while isinstance(value, dict | list) and value:
        key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
        inner = value[key]
        if not isinstance(inner, dict | list) or not inner or rng.random() < 0.4:
            act = rng.randrange(4)
            if act == 0 and isinstance(value, dict):
                del value[key]
            elif act == 1 and isinstance(value, dict):
                value["surprise"] = rng.choice(ABSURD)
            else:
                value[key] = rng.choice(ABSURD)
            return
        value = inner


def case(path: Path) -> None:
    """As replay reads it, up to the call."""
    found, with_whom = find.find(str(path))
    find.followed((), with_whom, found)
    family(found.family).full_settings(found)


def ledger(path: Path) -> None:
    found = Ledger.load(path)
    for entry in found.entries:
        assert entry.id
        found.frozen()


def report(path: Path) -> None:
    summarise(*read(path))


def record(path: Path) -> None:
    history._read(path)


def originals() -> dict[str, tuple[str, list[str]]]:
    """Reader -> the suffix of its files and texts that it reads."""
    cases = [p.read_text() for p in data.frozen_cases()[::7]]
    records = [p.read_text() for p in sorted((data.cases_dir() / "history").glob("*.toml"))[::6]]
    case = {name: ROW[name] for name in ("case", "family", "dtype", "device", "settings")}
    quantities = [{name: ROW[name] for name in ("quantity", "verdict", "headroom", "gates", "worst", "class")}]
    comparison = {"case": ROW["case"], "implementation": "a.b", "role": "reference", "quantities": 2 * quantities}
    rows = "\n".join(json.dumps(r) for r in (HEADER, case, comparison)) + "\n"
    entries = ["[[finding]]" + e for e in data.ledger_file().read_text().split("[[finding]]")[1:5]]
    toml = {"ledger": (".toml", entries), "record": (".toml", records)}
    return {"case": (".json", cases), "report": (".ndjson", [rows])} | toml


READERS = {"case": case, "ledger": ledger, "report": report, "record": record}


@pytest.mark.parametrize("reader", READERS)
def test_a_damaged_file_is_read_or_refused_in_one_line(tmp_path, reader):
    suffix, texts = originals()[reader]
    for name in ("regressions", "history"):
        (tmp_path / name).symlink_to(data.cases_dir() / name)
    for file in (data.cases_dir() / "history").glob("*.json"):
        (tmp_path / file.name).symlink_to(file)
    rng = random.Random(f"{SEED}/{reader}")
    refused = 0
    path = tmp_path / f"damaged{suffix}"
    for text in texts:  # undamaged they are read
        path.write_text(text)
        READERS[reader](path)
    for number in range(FILES // len(READERS)):
        content = damaged(rng.choice(texts), rng)
        path.write_bytes(content)
        try:
            READERS[reader](path)
        except UsageError as error:
            refused += 1
            message = str(error)
            assert "\n" not in message and len(message) < 8000, (number, message[:200])
        except Exception as error:
            told = f"{reader} {number}: {type(error).__name__}: {str(error)[:200]}: {content[:400]!r}"
            raise AssertionError(told) from error
    assert refused > FILES // len(READERS) // 4


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"V": 10**9}, "V=1000000000 must be between 1 and"),
        ({"V": 0}, "V=0 must be between 1 and"),
        ({"B": 1 << 12, "T": 1 << 12, "V": 1 << 10}, "entries in one tensor, at most"),
        ({"V": 10**4000}, "must be between"),
    ],
)
def test_sizes_are_bounded_before_anything_is_allocated(settings, says):
    with pytest.raises(UsageError, match=says):
        family("logprobs").full_settings(Case("logprobs", 1, "fp32", settings))


@pytest.mark.parametrize("name", ["grpo-trainer", "logprobs"])
def test_stored_tensors_are_never_replaced_by_generated_ones(name):
    settings = {"check": "step-one"} if name == "grpo-trainer" else {}
    case = Case(name, 1, "fp32", settings, "x.safetensors")
    ask = family(name).full_settings if name == "grpo-trainer" else family(name).build
    with pytest.raises(UsageError, match=r"does not store tensors|need both a file"):
        ask(case)
