"""Rows and runs that tests of reports share."""

import datetime
from pathlib import Path

from parity.results import memory
from parity.results.ledger_edit import toml
from parity.results.report.summary import summarise
from parity.results.row import About, Asked, Header, Row

START = datetime.datetime(2026, 11, 1, 1, 17, tzinfo=datetime.UTC)
LONG = "some_library.a_fused_linear_policy_loss_with_a_name_that_does_not_fit_into_a_column_of_any_kind"
EVIL = "<script>alert('x')</script> & \"more\""
ABOUT = {
    "versions": {"torch": "2.13.0", "trl": "1.16.0"},
    "device": "cpu",
    "profile": "quick",
    "seed": 7,
    "seconds": 12.5,
    "asked": Asked(ledger=str(Path(__file__).with_name("ledger.toml"))),
}
HEADER = Header(run="r1", header=About(**ABOUT))


def row(case="policy-1", quantity="loss", verdict="agree", **fields):
    """A row of family policy: a judged quantity, or with None a call that was not judged."""
    fails = verdict in ("disagree", "nondeterministic")
    told = {"cls": "logic", "blame": "candidate"} if fails else {}
    if quantity:
        size = fields.get("headroom", 4.0 if fails else 0.25)
        told |= {"gate": "norm", "headroom": size, "gates": {fields.get("gate", "norm"): size}}
    base = {"family": "policy", "implementation": "lib.loss", "dtype": "fp32", "device": "cpu"}
    base |= {"settings": {"B": 2, "T": 3, "V": 7, "H": 4}, "replay": f"parity replay {case}"}
    return Row(case=case, quantity=quantity, verdict=verdict, **base | told | fields)


def ledger_of(path, *entries):
    """A ledger with entries about family logprobs, each of its own fields; the first id stands in line 3."""
    told = {
        "id": "one",
        "family": "logprobs",
        "quantities": ["*"],
        "reason": "so",
        "date": "2026-11-22",
        "link": "here",
    }
    path.write_text("# mine\n" + "\n".join(toml(told | fields) for fields in entries))
    return path


def summary(*rows, header=HEADER):
    return summarise(header, rows)


WHERE = {
    "case": "policy-0123456789",
    "against": "trl.GRPOTrainer",
    "dtype": "bf16",
    "settings": {"B": 2, "T": 3, "V": 5, "H": 4, "beta": 0.04},
    "recipe": "fp32",
    "replay": "parity replay reports/findings/policy-0123456789.json --implementation lib.loss",
}
WORST = {"index": [1, 2, 3], "value": None, "oracle": 0.5, "error": None, "sequence": 1, "position": 2, "token": 4711}
LOSS = row(headroom=0.2, gate="scalar", **WHERE)
GRADIENT = row(
    quantity="grad_hidden",
    verdict="disagree",
    gate="row",
    headroom=85.25,
    gates={"structure": 0.0, "norm": 41.5, "max": 20.0, "row": 85.25, "slope": None},
    value=1.5,
    value_oracle=3.0,
    max_abs=0.5,
    dist=1.25,
    allclose=False,
    atol=1e-3,
    rtol=2e-2,
    worst=[WORST | {"masked": True}],
    message="0.5 times the oracle, which is 1 ÷ accumulation",
    **WHERE,
)
RELATION = row(
    quantity="relation: masked garbage",
    verdict="disagree",
    gate="relation",
    headroom=None,
    message="grad_hidden differs by up to 3",
    **WHERE,
)
PROTOCOL = row(quantity="protocol", gate="protocol", headroom=0.0, **WHERE)
FINDING = [LOSS, GRADIENT, RELATION, PROTOCOL]


def changed(rows, **fields):
    """Rows with other fields, which are copies."""
    return [Row(**{name: getattr(one, name) for name in one.__struct_fields__} | fields) for one in rows]


def declined(verdict, message, **fields):
    return row(quantity=None, verdict=verdict, **WHERE | {"message": message} | fields)


KNOWN = changed([LOSS], case="policy-2", implementation="lib.known")
KNOWN += changed([GRADIENT], case="policy-2", implementation="lib.known", known="trl-chunk-7")
UNSUPPORTED = declined("unsupported", "no softcap parameter", case="policy-3", implementation="lib.none")
CRASH = declined("crashed", "RuntimeError: [bold]kernel[/bold] \x1b[31mfailed\x00", case="policy-4")


def everything():
    return summary(*FINDING, *KNOWN, UNSUPPORTED, CRASH)


GOOD = [row(case=f"policy-{i}") for i in range(10)]
BAD = [row(headroom=40.0, verdict="disagree", message="2 <b>times</b> the oracle")]


def about(day, **fields):
    """The header of a night."""
    told = {"profile": "nightly", "device": "cpu", "seed": int(day), "seconds": 60.0, "git": "abc"}
    told |= {"started": (START + datetime.timedelta(days=day)).isoformat(), "versions": {"trl": "1.16.0"}}
    told |= {"asked": ABOUT["asked"]}
    return Header(run=f"run{day}", header=About(**told | fields))


def night(folder, day, rows, code=0, versions=None, **fields):
    """One night, kept and read again."""
    fields |= {"versions": versions} if versions else {}
    return keep(summarise(about(day, **fields), rows), code, folder)


def keep(of_run, code, folder):
    memory.keep(run := memory.of(of_run, code), folder)
    return next(one for one in memory.runs(folder, lambda line: None) if one.id == run.id)


def in_order(text, *pieces):
    at = -1
    for piece in pieces:
        found = text.find(piece, at + 1)
        assert found >= 0, f"{piece!r} is not after position {at} in\n{text}"
        at = found
