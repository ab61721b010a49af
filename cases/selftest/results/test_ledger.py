"""The ledger: mandatory fields, scopes, staleness."""

import datetime
import itertools
import json

import pytest
from msgspec.structs import replace
from packaging.specifiers import SpecifierSet

from cases.selftest.results import runs
from parity import data
from parity.case.case import Case
from parity.errors import UsageError
from parity.registry import facts, family
from parity.results import ledger as ledger_module
from parity.results.ledger import OLDER, Ledger, stale

ENTRY = """
[[finding]]
id = "x"
family = "logprobs"
implementations = ["lib.*"]
quantities = ["grad_*"]
settings = { bias = "banned", V = { min = 5 } }
reason = "because"
link = "lib.f"
date = "2026-11-20"
case = "case.json"
"""


@pytest.fixture
def ledger(tmp_path):
    case = family("logprobs").case(1, "fp32", {"bias": "banned"})
    (tmp_path / "case.json").write_text(json.dumps(case.to_json()))
    path = tmp_path / "ledger.toml"
    path.write_text(ENTRY)
    return path


def row(**changes):
    base = {"quantity": "grad_hidden", "verdict": "disagree", "family": "logprobs", "implementation": "lib.f"}
    return runs.row(**base | {"gate": "row", "cls": None} | changes)


def widened(ledger, line):
    ledger.write_text(ENTRY.replace('reason = "because"', f'reason = "because"\n{line}'))
    return Ledger.load(ledger)


SIZED, VARIANT = "headroom = 20.0", 'variants = ["capped KL"]'
TWINS = {"settings": {"check": "twins"}}  # of a trainer: under another seed it has other values and other sizes


@pytest.mark.parametrize(
    ("line", "changes", "settings", "known"),
    [
        ("", {}, {}, True),
        *(("", other, {}, False) for other in ({"implementation": "other.f"}, {"quantity": "logps"})),
        ("", {"verdict": "crashed"}, {}, False),
        *(("", {}, settings, False) for settings in ({"bias": "random"}, {"V": 4})),
        *((VARIANT, {"variant": name}, {}, name == "capped KL") for name in ("capped KL", "exchanged mixture", None)),
        *((SIZED, {"headroom": size}, {}, size == 60.0) for size in (60.0, 60.1, None)),  # what grew threefold is new
        *((SIZED, TWINS | {"headroom": 61.0, "seed": seed}, {}, seed == 5) for seed in (0, 5)),
        (SIZED, TWINS | {"headroom": None, "seed": 5}, {}, False),
    ],
)
def test_scope(ledger, line, changes, settings, known):
    case = family("logprobs").case(1, "fp32", {"bias": "banned", "V": 9} | settings)
    assert widened(ledger, line).match(row(**changes), facts(case)) == ("x" if known else None)


@pytest.mark.parametrize(
    ("line", "changes", "told"),
    [
        ("", {}, False),
        ("", {"verdict": "agree"}, True),
        ("", {"verdict": "unsupported", "quantity": None}, None),
        ("", {"verdict": "agree", "implementation": "other.f"}, None),
        ('rests_on = ["cpu"]', {"verdict": "agree", "device": "cuda"}, None),  # it rests on the rounding of one device
        ('rests_on = ["cpu"]', {"verdict": "agree"}, True),
        ('rests_on = ["cpu"]', {"device": "cuda"}, False),
    ],
)
def test_stale(ledger, line, changes, told):
    (entry,) = widened(ledger, line).entries
    assert stale(entry, [row(**changes)], changes.get("device", "cpu")) is told


def test_entries_of_cases_that_agree_on_an_h200_say_so():
    known = {e.id: e for e in Ledger.load(data.ledger_file()).entries}
    assert {i for i, e in known.items() if e.rests_on == ("cpu",)} == {
        "trl-ratio-overflow-under-mask",
        "liger-kl-overflow-under-mask",
        "trl-entropy-fp16-overflow",  # CUDA: TRL's fused kernel calculates in float32
        "trl-cpo-fp16-sum",  # likewise
    }


def test_an_entry_is_in_force_from_the_release_that_brought_it_on():
    named = [(e, *e.user.since.split()) for e in Ledger.load(data.ledger_file()).entries if e.user.since]
    for entry, package, first in named:
        scope = SpecifierSet(entry.versions.get(package, ""))
        assert first in scope and "0.0.1" not in scope, entry.id


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('reason = "because"', "", "Object missing required field `reason`"),
        ('case = "case.json"', 'case = "gone.json"', "does not exist"),
        ('date = "2026-11-20"', 'date = "2026-11-20"\nsince = "1"', "Object contains unknown field `since`"),
        ("[[finding]]", "[[finding", "not a readable ledger"),
        (ENTRY, ENTRY + ENTRY, "is used twice"),
        ('link = "lib.f"\n', "", "link is mandatory"),
        ('link = "lib.f"', 'link = "lib.f"\nexpires = "soon"', "is not a date"),
        ('link = "lib.f"', "link = \"lib.f\"\nheadroom = 'big'", "headroom"),
        ('link = "lib.f"', 'link = "lib.f"\nheadroom = -3', "headroom"),
        ('link = "lib.f"', 'link = "lib.f"\ndevices = ["gpu"]', "gpu"),
        ('link = "lib.f"', 'link = "lib.f"\ndtypes = ["float16"]', "float16"),
        ("V = { min = 5 }", 'V = { min = "a" }', "min and max are numbers"),
        ('link = "lib.f"', 'link = "lib.f"\nseverity = "grave"', "severity"),
        ('link = "lib.f"', 'link = "lib.f"\nuser = { rnk = 1 }', "rnk"),
        (
            'link = "lib.f"',
            'link = "lib.f"\nuser = { applies = [{ trainer = "GRPOTrainer" }] }',
            "takes a list of names",
        ),
    ],
)
def test_a_bad_ledger_is_one_line(ledger, old, new, words):
    ledger.write_text(ENTRY.replace(old, new))
    with pytest.raises(UsageError, match=words) as error:
        Ledger.load(ledger)
    assert "\n" not in str(error.value).strip() or words == "not a readable ledger"


def test_a_ledger_of_ones_own_adds_to_the_shipped_one(ledger):
    both, shipped = Ledger.known(ledger), Ledger.known()
    assert [e.id for e in both.entries] == [*(e.id for e in shipped.entries), "x"]
    assert both.line_of("x") == f"{ledger} line 3" and "ledger.toml line" in both.line_of(shipped.entries[0].id)
    assert both.frozen()[-1][1] == Case.load(ledger.with_name("case.json"))
    assert Ledger.known(data.ledger_file()) == shipped
    ledger.write_text("alone = true\n" + ENTRY)
    assert [e.id for e in Ledger.known(ledger).entries] == ["x"]


def test_an_id_of_the_shipped_ledger_is_taken(ledger):
    ledger.write_text(ENTRY.replace('"x"', '"liger-luspo-padding"'))
    with pytest.raises(UsageError, match="the shipped ledger, which it adds to, has 'liger-luspo-padding' too"):
        Ledger.known(ledger)


def test_an_expired_entry_names_its_line(ledger):
    loaded = widened(ledger, 'expires = "2026-12-31"')
    assert loaded.expired(datetime.date(2026, 12, 30)) == []
    (told,) = loaded.expired(datetime.date(2026, 12, 31))
    assert "x expired on 2026-12-31" in told and told.endswith("ledger.toml line 3")


def test_an_entry_without_link_says_why(ledger):
    ledger.write_text(ENTRY.replace('link = "lib.f"', 'unlinked = "our own stack"'))
    assert Ledger.load(ledger).entries[0].unlinked == "our own stack"


SHIPPED = Ledger.load(data.ledger_file())
BANNED = [entry for entry in SHIPPED.entries if entry.settings.get("bias") == "banned"]


@pytest.mark.parametrize("entry", BANNED, ids=lambda entry: entry.id)
def test_under_a_softcap_a_ban_is_finite_and_no_entry_about_it_covers_a_failure(entry):
    about = Case.load(data.cases_dir() / entry.case)
    scope = {name: wanted for name, wanted in entry.settings.items() if name != "softcap"}
    settings = about.settings | {n: True if w is True else 0.3 for n, w in scope.items() if n == "entropy_quantile"}
    settings |= {"entropy_coef": 0.3} if "entropy_coef" in scope else {}
    settings |= {"V": 4200} if "V beyond a chunk" in scope else {}
    name = next(n for n in entry.implementations if "*" not in n)
    scoped = {"family": entry.family, "gate": (*entry.gates, None)[0], "cls": entry.cls}
    failed = row(implementation=name, quantity=entry.quantities[0], **scoped)
    for softcap, covered in ((None, True), (30.0, False)):
        case = family(entry.family).case(1, "fp32", settings | {"softcap": softcap})
        assert entry.covers(failed, facts(case)) is covered


def test_a_scope_may_name_the_dtype_that_products_have_under_autocast_too():
    (entry,) = (e for e in SHIPPED.entries if e.id == "cce-compiled-softcap")
    entry = replace(entry, versions={})
    failed = row(implementation="cce.torch_compile", quantity="grad_weight", cls="precision")
    for context, covered in (("autocast", True), ("autocast_fp16", True), ("plain", False)):
        case = family("logprobs").case(1, "fp32", {"softcap": 30.0, "context": context})
        assert entry.covers(failed, facts(case)) is covered


@pytest.mark.parametrize(("dtype", "context"), [("fp16", "plain"), ("fp32", "autocast_fp16")])
def test_a_nan_of_the_entropy_is_one_entry(dtype, context):
    """By a ban or by overflow in float16: were it both, the counts of findings would say one defect twice."""
    both = [e for e in SHIPPED.entries if e.id in ("trl-entropy-minus-inf", "trl-entropy-fp16-overflow")]
    about = {"implementation": "trl.selective_log_softmax", "quantity": "entropy", "gate": "structure"}
    failed, seen = row(**about, dtype=dtype, cls="precision"), []
    drawn = ("none", "banned"), (None, 30.0, 50.0), (1.0, 0.015, 0.0029, 0.001428)
    for bias, softcap, temperature in itertools.product(*drawn):
        settings = {"bias": bias, "softcap": softcap, "temperature": temperature, "peak": 50.0, "entropy": "value"}
        known = facts(family("logprobs").case(1, dtype, settings | {"H": 2, "context": context}))
        covering = [e.id for e in both if e.covers(failed, known)]
        assert len(covering) == known["a log-prob of -inf"], (settings, covering)
        seen += covering
    assert set(seen) == {e.id for e in both}


def test_entries_of_older_releases_are_read_beside_the_ledger_where_they_are_in_force(monkeypatch):
    path = data.ledger_file()
    older = {e.id: e for e in Ledger.load(path.with_name(OLDER)).entries}
    assert len(older) >= 40 and not older.keys() & {e.id for e in Ledger.load(path).entries}
    assert all(any("<" in spec for spec in e.versions.values()) for e in older.values())
    assert all(e.id.startswith("older-") and e.severity is None for e in older.values())
    versions = {"trl": "1.12.0", "liger-kernel": "0.8.2", "transformers": "5.17.0"}
    monkeypatch.setattr(ledger_module, "installed", lambda name: versions.get(name, "9"))
    then = Ledger.load(path)
    assert "older-grpo-liger-softcap" in {e.id for e in then.entries}
    assert "older-grpo-dapo-window" not in {e.id for e in then.entries}
    assert "ledger-older.toml line" in then.line_of("older-grpo-liger-softcap")


@pytest.mark.parametrize(
    "trainer, since", [("sft", "1.0.0"), ("dpo", "1.0.0"), ("cpo", "0.29.0"), ("online-dpo", "0.29.0")]
)
def test_nulls_of_tool_calls_are_known_of_each_trainer_from_the_release_that_has_them(trainer, since):
    asked = {"check": "conversations", "beside": "calls"}
    for version in ("0.29.0", "1.0.0", "1.16.0"):
        known = [
            e.id
            for e in Ledger.load(data.ledger_file()).entries
            if e.settings == asked and e.covers_implementation(f"{trainer}-trainer.released")
            if e.in_force({"trl": version})
        ]
        assert len(known) == (version >= since), (version, known)


def test_what_a_scope_excludes_is_a_value_of_its_setting():
    """`{ not = X }` with an X that does not exist excludes nothing."""
    path, checked = data.ledger_file(), 0
    for e in (*Ledger.load(path).entries, *Ledger.load(path.with_name(OLDER)).entries):
        declared = family(e.family).settings if "*" not in e.family else {}
        for name, wanted in e.settings.items():
            setting = declared.get(name) if isinstance(wanted, dict) and "not" in wanted else None
            if setting is None or not setting.choices:
                continue
            checked += 1
            there = {"none" if v is None else v for v in (setting.default, *setting.choices)}
            assert wanted["not"] in there, (e.id, name)
    assert checked >= 5
