"""What is printed: the pieces, their order, and that nothing a library writes can break a page."""

import io
import re
from xml.etree import ElementTree

import pytest
from msgspec import convert
from rich.console import Console

from parity.results.header import Header
from parity.results.report import render
from parity.results.report import summary as counting
from parity.results.row import Row

LONG = "some_library.a_fused_linear_policy_loss_with_a_name_that_does_not_fit_into_a_column_of_any_kind"
HEADER = {
    "schema": 1,
    "run": "r1",
    "header": {
        "versions": {"torch": "2.13.0", "trl": "1.16.0"},
        "device": "cpu",
        "profile": "quick",
        "seed": 7,
        "seconds": 12.5,
        "dimensions": {"policy": {"B": 2, "T": 3, "V": 7, "H": 4, "beta": 0.0, "softcap": None}},
    },
}
BASE = {
    "case": "policy-0123456789",
    "family": "policy",
    "implementation": "lib.loss",
    "role": "candidate",
    "against": "trl.GRPOTrainer",
    "dtype": "bf16",
    "device": "cpu",
    "class": None,
    "blame": None,
    "known": None,
    "settings": {"B": 2, "T": 3, "V": 5, "H": 4, "beta": 0.04},
    "recipe": "fp32",
    "worst": [],
    "message": "",
    "replay": "parity replay reports/findings/policy-0123456789.json --implementation lib.loss",
}
LOSS = BASE | {"quantity": "loss", "verdict": "agree", "gate": "scalar", "headroom": 0.2, "gates": {"scalar": 0.2}}
GRADIENT = BASE | {
    "quantity": "grad_hidden",
    "verdict": "disagree",
    "class": "logic",
    "blame": "candidate",
    "gate": "row",
    "headroom": 85.25,
    "gates": {"structure": 0.0, "norm": 41.5, "max": 20.0, "row": 85.25, "slope": None},
    "value": 1.5,
    "value_oracle": 3.0,
    "max_abs": 0.5,
    "dist": 1.25,
    "allclose": False,
    "atol": 1e-3,
    "rtol": 2e-2,
    "worst": [
        {
            "index": [1, 2, 3],
            "value": None,
            "oracle": 0.5,
            "error": None,
            "sequence": 1,
            "position": 2,
            "token": 4711,
            "masked": True,
        }
    ],
    "message": "0.5 times the oracle, which is 1 ÷ accumulation",
}
RELATION = BASE | {
    "quantity": "relation: masked garbage",
    "verdict": "disagree",
    "class": "logic",
    "blame": "candidate",
    "gate": "relation",
    "headroom": None,
    "gates": {"relation": None},
    "message": "grad_hidden differs by up to 3",
}
PROTOCOL = BASE | {
    "quantity": "protocol",
    "verdict": "agree",
    "gate": "protocol",
    "headroom": 0.0,
    "gates": {"protocol": 0.0},
}
FINDING = [LOSS, GRADIENT, RELATION, PROTOCOL]


def declined(verdict, message, **fields):
    return (
        BASE
        | {"quantity": None, "verdict": verdict, "gate": None, "headroom": None, "gates": {}}
        | fields
        | {"message": message}
    )


def rename(rows, **fields):
    return [r | fields for r in rows]


KNOWN = rename([LOSS, GRADIENT | {"known": "trl-chunk-7"}], case="policy-2", implementation="lib.known")
UNSUPPORTED = declined("unsupported", "no softcap parameter", case="policy-3", implementation="lib.none")
CRASH = declined("crashed", "RuntimeError: [bold]kernel[/bold] \x1b[31mfailed\x00", case="policy-4")


def typed(rows):
    return [convert(row, Row) for row in rows]


def summarise(header, rows):
    return counting.summarise(convert(header, Header), typed(rows))


def text_of(rows, *width):
    return render.text_of(typed(rows), *width)


def everything():
    return summarise(HEADER, [*FINDING, *KNOWN, UNSUPPORTED, CRASH])


def shown(summary, width=100, **options):
    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None, highlight=False, **options)
    render.terminal(summary, console, full=True)
    return out.getvalue()


def in_order(text, *pieces):
    at = -1
    for piece in pieces:
        found = text.find(piece, at + 1)
        assert found >= 0, f"{piece!r} is not after position {at} in\n{text}"
        at = found


@pytest.mark.parametrize("width", [80, 100, 120])
def test_the_failure_text_fits_and_names_a_relation_beside_the_table(width):
    text = text_of(FINDING, width)
    in_order(text, "disagree  relation: masked garbage", "relation  two calls that must agree exactly do not")
    in_order(text, "hint     grad_hidden: 0.5 times", "hint     relation: masked garbage: grad_hidden differs")
    assert max(len(line) for line in text.splitlines() if not line.startswith("replay")) <= width


def test_what_replay_says_where_nothing_fails():
    """A line an implementation: how nearly it agrees, or why it was not judged; none without rows."""
    agreeing = {**LOSS, "verdict": "agree"}
    declined = {**LOSS, "verdict": "unsupported", "quantity": None, "message": "no fused path"}
    out = io.StringIO()
    console = Console(file=out, width=100, color_system=None)
    for rows in ([agreeing], [declined], [], [GRADIENT, agreeing]):
        render.render_case(typed(rows), console)
    first, second, third = out.getvalue().splitlines()[:3]
    assert first == "agrees      lib.loss · 1 quantity, at most 0.2 of the allowed error (loss, gate scalar)"
    assert second == "unsupported lib.loss · no fused path"
    assert third == "class    logic"


def test_the_whole_failure_text():
    assert text_of([LOSS, GRADIENT, PROTOCOL], 100) == (
        "class    logic\n"
        "wrong    the candidate lib.loss (the reference trl.GRPOTrainer agrees with float64)\n"
        "quantity grad_hidden, gate row: 85.25 times the allowed error\n"
        "sizes    value 1.5 · float64 3 · max |error| 0.5 · torch.dist 1.25 · torch.allclose False at atol\n"
        "         0.001, rtol 0.02\n"
        "case     policy-0123456789 · bf16 · cpu\n"
        "settings BxTxVxH 2x3x5x4, beta=0.04\n"
        "recipe   fp32\n"
        "\n"
        "error ÷ allowed at every gate: above 1 fails\n"
        "quantity    verdict  scalar structure  norm   max   row slope\n"
        "loss        agree      0.20\n"
        "grad_hidden disagree                0 41.50 20.00 85.25     ∞\n"
        "agree     protocol\n"
        "norm      the length of the whole error\n"
        "max       the largest error of one entry\n"
        "row       the largest error of one row: a token, or a word of the vocabulary\n"
        "slope     a common factor: all too large, or all too small\n"
        "\n"
        "worst entries of grad_hidden\n"
        "sequence position token id masked?      value float64      error\n"
        "       1        2     4711     yes not finite     0.5 not finite\n"
        "\n"
        "hint     grad_hidden: 0.5 times the oracle, which is 1 ÷ accumulation\n"
        "\n"
        "replay   parity replay reports/findings/policy-0123456789.json --implementation lib.loss\n"
    )


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"blame": "reference"}, "the reference lib.loss"),
        ({"blame": "both"}, "both the candidate lib.loss and the reference trl.GRPOTrainer"),
        ({"blame": "harness"}, "the harness, in its adapter for lib.loss"),
        ({"blame": None, "variant": "trl 1.13"}, "nobody: lib.loss follows another definition, 'trl 1.13'"),
        ({"blame": None}, "not decided"),
    ],
)
def test_who_is_wrong(fields, says):
    assert says in text_of([GRADIENT | fields], 120)


def test_a_crash_has_a_text_too():
    text = text_of([CRASH])
    in_order(
        text, "class    crashed", "wrong ", "quantity none: crashed", "[bold]kernel[/bold]", "replay   parity replay"
    )


def test_a_long_replay_line_stays_one_line():
    line = "parity replay " + "x" * 200 + " --implementation " + LONG
    assert f"replay   {line}\n" in text_of([GRADIENT | {"replay": line}], 80)
    s = summarise(HEADER, [GRADIENT | {"replay": line}])
    assert f"{line}\n" in shown(s, 80)


def test_the_summary_in_its_order():
    text = shown(everything())
    in_order(
        text,
        "trl 1.16.0, torch 2.13.0: 1 unranked known defect seen, 2 new",
        "new 1 · lib.loss · crashed",
        "class    crashed",
        "class    logic",
        "known defects, unranked",
        "lib.loss",
        "lib.known",
        "known trl-chunk-7 · lib.known · logic in grad_hidden",
        "unsupported, 1 case: no softcap parameter",
        "2 compared · 0 agree · 1 known · 1 disagree · 1",
        "\nnext ",
    )
    assert "passed" not in text


def test_a_clean_run_says_what_it_compared():
    text = shown(summarise(HEADER, [LOSS]))
    assert ": 1 compared · 1 agree\n" in text and "no known defects seen, 0 new" in text


@pytest.mark.parametrize("width", [80, 100, 120])
def test_ids_are_never_cut(width):
    text = shown(summarise(HEADER, rename(FINDING, implementation=LONG)), width)
    assert f"new 1 · {LONG} · logic" in " ".join(text.split()) and f"\n{LONG}\n" in text.split("error ÷ allowed, ")[1]


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_fits(width):
    table = shown(everything(), width).split("error ÷ allowed, ")[1].split("not compared")[0]
    assert max(len(line) for line in table.splitlines()) <= width and "85.25!" in table


def test_an_interrupted_run_says_so():
    s = summarise(HEADER | {"interrupted": True}, [LOSS])
    assert all("interrupted" in text for text in (render.markdown(s), render.page(s), render.junit(s)))


def test_colour_adds_nothing_but_colour():
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=True, color_system="standard", highlight=False)
    render.terminal(everything(), console, full=True)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())
    assert plain == shown(everything())


def test_junit():
    root = ElementTree.fromstring(render.junit(everything()))
    cases = {c.get("classname"): c for c in root.iter("testcase")}
    failure = cases["policy.lib.loss"].find("failure")
    assert cases["policy.lib.loss"].get("name") == "bf16, cpu"
    assert "the candidate lib.loss" in failure.get("message") and "crashed" in failure.get("message")
    in_order(failure.text, "failed", "class    logic", "error ÷ allowed at every gate", BASE["replay"])
    assert cases["policy.lib.known"].find("skipped").get("message") == "known: trl-chunk-7"
    assert cases["policy.lib.none"].find("skipped").get("message") == "unsupported: no softcap parameter"
    assert (root.get("tests"), root.get("failures"), root.get("errors"), root.get("skipped")) == ("3", "1", "0", "2")
    crashed = ElementTree.fromstring(render.junit(summarise(HEADER, [CRASH, *KNOWN])))
    assert (crashed.get("errors"), crashed.get("failures"), crashed.get("skipped")) == ("1", "0", "1")


def test_html_escapes():
    evil = "<script>alert('x')</script> & \"more\""
    page = render.page(summarise(HEADER, rename(FINDING, message=evil, implementation=evil, case=evil, replay=evil)))
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert not re.search(r"https?://", page), "nothing is fetched"


def test_html_says_the_same():
    in_order(
        render.page(everything()),
        "1 unranked known defect seen, 2 new",
        "trl 1.16.0, torch 2.13.0",
        "2 compared on CPU, none on CUDA: 2 compared · 0 agree · 1 known · 1 disagree",
        "Known defects of this stack",
        "parity replay trl-chunk-7",
        "New findings",
        "logic in grad_hidden",
        "the candidate lib.loss",
        "85.25",
        "4711",
        "1 ÷ accumulation",
        BASE["replay"],
        "Known findings",
        "trl-chunk-7",
        "no softcap parameter",
    )


def test_markdown():
    text = render.markdown(everything())
    in_order(
        text,
        "## Numerical parity: trl 1.16.0, torch 2.13.0: 1 unranked known defect seen, 2 new",
        "2 compared · 0 agree · 1 known · 1 disagree",
        "### New findings",
        "**logic in grad\\_hidden** · `lib.loss`",
        f"`{BASE['replay']}`",
        "### Known defects",
        "`parity replay trl-chunk-7`",
        "| policy | `lib.known` | bf16 (cpu) |",
        "### Not compared",
    )


def test_markdown_escapes():
    evil = "a|b `c` <img src=x> [d](e)\nnew"
    text = render.markdown(summarise(HEADER, [declined("unsupported", evil)]))
    (cell,) = [line for line in text.splitlines() if line.startswith("| policy")]
    assert len(re.findall(r"(?<!\\)\|", cell)) == 9
    assert "<img" not in text


def test_a_crash_is_not_given_the_reason_of_what_was_unsupported():
    rows = [declined("unsupported", "no bias parameter"), declined("crashed", "boom") | {"case": "policy-2"}]
    text = render.markdown(summarise(HEADER, rows))
    (cell,) = [line for line in text.splitlines() if line.startswith("| policy")]
    assert "CRASHED" in cell
    assert "no bias" not in cell


def test_markdown_fits_a_comment():
    rows = [
        GRADIENT | {"case": f"policy-{k}", "implementation": f"lib.loss{k}", "message": "x" * 300} for k in range(150)
    ]
    text = render.markdown(summarise(HEADER, rows))
    assert len(text) < 65_536
    assert "… and 90 more." in text


def test_files_are_written(tmp_path):
    render.write(everything(), render.Ending(folder=tmp_path))
    assert all((tmp_path / name).stat().st_size > 500 for name in ("junit.xml", "summary.md", "index.html"))
