"""What `parity replay --issue` prints: its script, in a fresh process without this package, shows what was judged."""

from __future__ import annotations

import ast
import hashlib
import math

import pytest
import torch

from parity import data
from parity.case.case import Case, normal
from parity.registry import bench_of, load, loss_family, resolved, run_case, select
from parity.results.ledger import Ledger
from parity.tools.issue import issue_text, script
from parity.tools.issue.bundle import bundled
from parity.tools.issue.ran import FAULT, ran
from parity.tools.issue.sources import located
from parity.tools.issue.standalone import limits_of
from parity.tools.issue.tensors import helpers, number
from parity.tools.issue.text import at_fault, first_sentence, script_of
from parity.tools.upstream import written

LUSPO = Case("policy", 3, "fp32", {"loss_type": "luspo", "lengths": [3, 1]})
BANNED = Case("logprobs", 3, "fp32", {"bias": "banned", "entropy": "gradient", "V": 9})
ROUNDED = Case("divergence", 5, "bf16", {"beta": 0.999, "teacher_peak": 4.0})
OWN = "fixtures/rms_norm.py"


def rows_of(case, implementation):
    return list(run_case(case, [implementation], thorough=False))


def columns(text):
    """Printed table: quantity -> (library, float64)."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {cells[0]: (cells[1], cells[2]) for cells in lines[1:]}


def same(printed, row):
    if row.value is None:
        return printed in ("nan", "inf", "none")
    return math.isclose(float(printed), row.value, rel_tol=1e-4, abs_tol=1e-30)


@pytest.mark.parametrize(
    ("case", "id"),
    [
        pytest.param(BANNED, "trl.selective_log_softmax", id="log-probs"),
        pytest.param(LUSPO, "liger.FusedLinearGRPOLoss", id="policy"),
        pytest.param(ROUNDED, "trl.generalized_jsd_loss", id="divergence"),
    ],
)
def test_a_script_prints_what_was_judged_and_exits_with_1(case, id):
    implementation = load()[id]
    rows = rows_of(case, implementation)
    assert any(r.verdict == "disagree" for r in rows)
    text = script(case, implementation, limits_of(rows))
    assert imported(text).isdisjoint({"parity", "json"}), text
    done = ran(text)
    assert done.code == 1, done
    table = columns(done.output)
    judged = [r for r in rows if r.quantity in table]
    assert len(judged) > 2
    for row in judged:
        library, exact = table[row.quantity]
        assert same(library, row), (row.quantity, library, row.value)
        assert math.isclose(float(exact), row.value_oracle, rel_tol=1e-5, abs_tol=1e-12)


def test_a_script_of_what_is_right_exits_with_0():
    case = Case("policy", 3, "fp32", {"loss_type": "dapo", "lengths": [3, 1], "beta": 0.1})
    done = ran(script(case, load()["liger.FusedLinearGRPOLoss"]))
    assert (done.code, done.output.splitlines()[-1]) == (0, "right"), done


def test_a_family_of_ones_own_gets_an_issue():
    resolved(f"{OWN}:FAMILY")
    (wrong,) = (i for i in select([f"{OWN}:wrong"]) if i.is_function)
    case = Case("rms_norm", 5, "fp32", {"eps": 0.3})
    text = issue_text(case, wrong, rows_of(case, wrong))
    assert text.splitlines()[0].startswith("# user function: ") and "off by" in text.splitlines()[0]
    assert "eps=0.3" in text


def test_the_branches_of_other_settings_are_left_out():
    fam = loss_family("policy")
    bundle, _ = bundled(fam.build(LUSPO), fam.oracle)
    text = "\n".join(ast.unparse(f) for f in bundle.functions.values())
    assert "mask / count" in text
    for other in ("cispo", "sigmoid", "lora_a", "top_entropy_quantile", "def _mean"):
        assert other not in text


def test_a_script_that_crashes_shows_nothing():
    assert ran("raise ValueError('no')").code == FAULT
    assert ran("raise SystemExit(1)").code == 1


def ledger():
    return Ledger.load(data.ledger_file())


def test_an_entry_is_written_with_its_reason_first_and_the_function_at_fault(tmp_path):
    entry = next(e for e in ledger().entries if e.id == "trl-entropy-minus-inf")
    sent = written(entry, ledger(), tmp_path)
    assert (sent.code, sent.right) == (1, True), sent
    text = (tmp_path / entry.id / "issue.md").read_text()
    title, _, reason, *_ = text.splitlines()
    assert "`entropy_from_logits`: NaN entropy" in title
    assert reason == entry.reason
    code = (tmp_path / entry.id / "script.py").read_text()
    assert code.splitlines()[1] == f"# {first_sentence(entry.reason)}"
    assert code in text


def test_an_entry_of_another_release_has_nothing_to_show(tmp_path):
    entry = next(e for e in ledger().entries if e.id == "sft-liger-dft")
    sent = written(entry, ledger(), tmp_path)
    assert (sent.code, sent.right) == (None, True)
    assert "not in the installed versions" in sent.told


SCRIPTS = sorted((data.cases_dir() / "scripts").glob("*.py"))


def test_every_script_beside_the_ledger_belongs_to_an_entry_and_needs_the_libraries_alone():
    known = {e.id: e for e in ledger().entries}
    for file in SCRIPTS:
        assert file.stem in known
        assert "parity" not in imported(file.read_text()), file
        case = Case.load(ledger().folder / known[file.stem].case)
        assert script_of(case, load()[f"{case.family}.released"], [], known[file.stem]) == file.read_text()


@pytest.mark.parametrize("name", ["gc-overwrite", "head-hook"])
def test_a_sample_of_them_shows_its_defect(name):
    done = ran((data.cases_dir() / "scripts" / f"{name}.py").read_text())
    assert done.code == 1, done


def imported(text):
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module).partition(".")[0])
    return found


def test_the_function_at_fault_is_read_from_the_link():
    entries = {e.id: e for e in ledger().entries}
    assert at_fault(entries["softcap-names"]) == "add_fused_lm_head"
    assert at_fault(None) == ""


def test_the_hash_of_a_script_is_that_of_a_case():
    key = int.from_bytes(hashlib.blake2b(b"7/hidden", digest_size=8).digest(), "little", signed=True)
    space = {"torch": torch}
    exec("\n".join(helpers([f"x = normal({key}, 3, 4)"])), space)
    assert torch.equal(space["normal"](key, 3, 4), normal(7, "hidden", (3, 4)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_number_is_the_shortest_that_gives_the_bits(dtype):
    values = bench_of(LUSPO).inputs.hidden.to(dtype).flatten()
    for value in values.tolist():
        assert torch.tensor(float(number(value, dtype)), dtype=dtype).item() == value


def test_code_is_found_in_the_installed_release():
    assert located("trl.trainer.utils.selective_log_softmax").startswith("trl/trainer/utils.py:")
    assert "not found" in located("trl.trainer.utils.gone")
