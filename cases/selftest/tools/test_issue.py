"""What `parity replay --issue` prints: its script, run in a fresh process, gives the numbers of its table."""

from __future__ import annotations

import ast
import hashlib
import math
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from parity.case.case import Case, normal
from parity.implementations.implementation import Implementation
from parity.registry import bench_of, family, load, run_case
from parity.results.row import Row
from parity.tools.issue import issue_text, script
from parity.tools.issue.calls import CALLS
from parity.tools.issue.definition import DEFINITIONS
from parity.tools.issue.sources import located
from parity.tools.issue.tensors import helpers, number

LIBRARIES = {
    "trl": {"trl"},
    "trl.GRPOTrainer": {"trl", "transformers", "datasets", "tokenizers"},  # what TRL itself stands on
    "liger": {"liger_kernel"},
    "cce": {"cut_cross_entropy"},
}

UNHURRIED = {"suppress_health_check": list(HealthCheck)}
HEAD = ("hidden", "weight", "bias", "lora_a", "lora_b")

BANNED = Case("logprobs", 3, "fp32", {"bias": "banned", "entropy": "gradient", "V": 9})
LUSPO = Case("policy", 3, "fp32", {"loss_type": "luspo", "lengths": [3, 1]})
FINDINGS = [
    pytest.param(BANNED, "trl.selective_log_softmax", ("entropy", "nan"), id="banned tokens, plain"),
    pytest.param(BANNED, "trl.ChunkedLogProbFunction", ("entropy", "nan"), id="banned tokens, chunked"),
    pytest.param(LUSPO, "liger.FusedLinearGRPOLoss", ("loss", None), id="luspo counts padding"),
]


def implementations() -> dict[str, Implementation]:
    return load()


def rows_of(case: Case, id: str) -> list[Row]:
    known = implementations()
    reference = next(i for i in known.values() if i.family == case.family and i.role == "reference")
    parties = {i.id: i for i in (reference, known[id])}
    return list(run_case(case, parties.values(), thorough=False))


def run(text: str, folder) -> dict[str, dict[str, str]]:
    """Output of a script in a fresh process: column -> metric -> printed number."""
    assert "parity" not in imported(text)
    file = folder / "reproduce.py"
    file.write_text(text)
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "TRITON_INTERPRET")}
    done = subprocess.run([sys.executable, str(file)], cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return columns(done.stdout)


def columns(text: str) -> dict[str, dict[str, str]]:
    """A Markdown table as column -> metric -> cell; a column goes by the first word of its header."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ") and "---" not in line]
    header, *body = rows
    return {head.split()[0]: {cells[0]: cells[i] for cells in body} for i, head in enumerate(header) if i}


def imported(text: str) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module).partition(".")[0])
    return found


def code_in(issue: str) -> str:
    return issue.split("```python\n")[1].split("```")[0]


def presentable(text: str, id: str) -> bool:
    lines = text.splitlines()
    allowed = LIBRARIES.get(id) or LIBRARIES[id.partition(".")[0]]
    return len(lines) <= 40 and max(map(len, lines)) <= 120 and imported(text) <= {"torch", "os", "math"} | allowed


@pytest.mark.parametrize(("case", "id", "expected"), FINDINGS)
def test_the_script_of_an_issue_prints_the_numbers_of_its_table(case, id, expected, tmp_path):
    rows = rows_of(case, id)
    if all(r.verdict != "disagree" for r in rows if r.implementation == id):
        pytest.skip(f"{id}: the installed release has no such disagreement")
    issue = issue_text(case, implementations()[id], rows)
    code = code_in(issue)
    assert presentable(code, id)
    table, printed = columns(issue.split("## Code")[0]), run(code, tmp_path)
    role = implementations()[id].role
    assert printed["float64"] == table["float64"]
    for column in set(printed) - {"float64"}:
        assert printed[column].keys() == table[column].keys()
        for metric, text in printed[column].items():
            assert same(text, table[column][metric]), f"{column} {metric}: script {text}, table {table[column][metric]}"
    metric, value = expected
    assert printed[role][metric] != printed["float64"][metric]
    assert value is None or printed[role][metric] == value


def same(a: str, b: str) -> bool:
    """Equal as printed, or to float32's last digits: thread counts differ between processes."""
    return a == b or math.isclose(float(a), float(b), rel_tol=1e-5)


def test_an_issue_names_library_version_setting_effect_and_code():
    issue = issue_text(
        LUSPO, implementations()["liger.FusedLinearGRPOLoss"], rows_of(LUSPO, "liger.FusedLinearGRPOLoss")
    )
    title = issue.splitlines()[0]
    assert title.startswith(f"# liger-kernel {implementations()['liger.FusedLinearGRPOLoss'].version()}: ")
    assert "loss_type=luspo" in title
    assert "FusedLinearGRPOLoss" in title
    assert "liger_kernel/chunked_loss/grpo_loss.py:" in issue
    assert "trl/trainer/grpo_trainer.py:" in issue
    assert f"- torch {torch.__version__}" in issue
    assert "- transformers " in issue
    assert "- python " in issue
    assert os.sep + "site-packages" not in issue


LOGPROBS = Case("logprobs", 5, "fp16", {"B": 1, "T": 2, "V": 5, "H": 3, "temperature": 0.7})
POLICY = Case("policy", 5, "fp32", {"B": 2, "T": 2, "V": 4, "H": 2, "lengths": [2, 1]})


@pytest.mark.parametrize("id", sorted(CALLS))
def test_every_call_fits_a_presentable_script(id):
    implementation = implementations()[id]
    if implementation.missing() or id == "trl.GRPOTrainer.liger":  # its releases are another environment's
        pytest.skip(implementation.missing() or "no such path in this release")
    text = script({"logprobs": LOGPROBS, "policy": POLICY}[implementation.family], implementation)
    assert "import json" not in text, text
    assert presentable(text, id), text


@pytest.mark.parametrize(
    "id",
    [
        "trl.GRPOTrainer",
        "trl.chunked_logprob_kernel",
        "cce.unfiltered",
        "liger.cross_entropy",
        "liger.triton_grpo_loss",
    ],
)
def test_a_script_gives_what_the_adapter_gives(id, tmp_path):
    implementation = implementations()[id]
    if implementation.missing():
        pytest.skip(implementation.missing())
    case = {"logprobs": LOGPROBS, "policy": POLICY}[implementation.family]
    rows = rows_of(case, id)
    printed = run(script(case, implementation), tmp_path)
    judged = [r for r in rows if r.implementation == id and r.quantity in printed["float64"]]
    if implementation.interpreted and not judged:
        pytest.skip(f"kernels do not run in this process: {rows[-1].message}")
    assert len(judged) == len(printed["float64"])
    for row in judged:
        assert same(printed[implementation.role][row.quantity], f"{row.value:.6g}")
        assert same(printed["float64"][row.quantity], f"{row.value_oracle:.6g}")


@pytest.mark.parametrize("name", sorted(DEFINITIONS))
def test_the_written_definition_is_the_oracle(name):
    fam = family(name)

    @settings(max_examples=60, deadline=None, database=None, derandomize=True, phases=[Phase.generate], **UNHURRIED)
    @given(st.data())
    def check(data):
        drawn = fam.draw(data.draw, st, "fp32", "quick", ("plain",))
        drawn |= {"V": min(drawn["V"], 50)}
        bench = bench_of(fam.case(data.draw(st.integers(0, 999)), "fp32", drawn))
        x = bench.inputs
        names = [n for n in fam.outputs if n in bench.exact]
        leaves = {n: x.tensors[n].double().requires_grad_() for n in x.leaves}
        scope = {n: t.double() if n in HEAD else t for n, t in x.tensors.items() if t is not None}
        scope |= {"torch": torch, "inf": math.inf} | leaves
        exec("\n".join(DEFINITIONS[name](x, names)), scope)
        for quantity in names:
            assert torch.allclose(scope[quantity].double(), bench.exact[quantity], rtol=1e-6, atol=1e-12), quantity
        torch.autograd.backward([scope[n] for n in x.cotangents], [g.double() for g in x.cotangents.values()])
        for leaf in x.leaves:
            truth = bench.exact[f"grad_{leaf}"]
            assert torch.allclose(leaves[leaf].grad, truth, rtol=1e-6, atol=1e-9 * float(truth.abs().max())), leaf

    check()


@pytest.mark.parametrize(
    "moved", [{"V": 3000, "H": 5, "T": 2}, {"V": 700, "H": 9, "bias": "banned", "head_dtype": "fp32"}]
)
def test_a_large_case_is_hashed_to_the_same_bits(moved):
    case = Case("logprobs", 11, "bf16", moved)
    text = script(case, implementations()["trl.ChunkedLogProbFunction"])
    assert presentable(text, "trl")
    assert "def normal(" in text
    names: dict = {}
    exec(text.split("\ndef candidate(")[0], names)
    for name, tensor in family("logprobs").build(case).tensors.items():
        if tensor is not None:
            assert torch.equal(names[name], tensor), name


def test_the_hash_of_a_script_is_that_of_cases():
    names: dict = {"torch": torch}
    exec("\n".join(helpers(["normal("])), names)
    key = int.from_bytes(hashlib.blake2b(b"7/weight", digest_size=8).digest(), "little", signed=True)
    assert torch.equal(names["normal"](key, 40, 3), normal(7, "weight", (40, 3)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_a_written_number_is_read_back_to_the_bit(dtype):
    values = (normal(1, "values", (200,)) * torch.logspace(-6, 3, 200, dtype=torch.float64)).to(dtype)
    written = [float(number(v, dtype)) for v in values.tolist()]
    assert torch.equal(torch.tensor(written, dtype=dtype), values)


def test_an_implementation_without_a_call_goes_through_the_harness():
    user = Implementation(id="mine.py:loss", family="logprobs", role="candidate", call=lambda x: {})
    text = script(BANNED, user)
    assert "parity" in text
    assert "replay" in text
    assert imported(text) == {"json", "subprocess"}


def test_code_is_found_under_decorators_and_missing_code_says_so():
    assert located("parity.case.case.normal").startswith("parity/case.py:")
    assert located("trl.kernels.chunked_logprob._forward_kernel").startswith("trl/kernels/chunked_logprob.py:")
    assert "not found" in located("trl.kernels.no_such_module.f")
