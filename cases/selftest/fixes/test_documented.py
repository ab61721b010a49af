"""The snippets of README and docs/fixes.md, run as they stand on a real trainer, model and batch."""

import re
from pathlib import Path

import pytest
import torch

from fixtures import training
from parity.fixes import patches
from parity.fixes.patch import Patch

ROOT = Path(__file__).parents[3]

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]


def snippets(file):
    """The Python blocks that import the fixes."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / file).read_text(), re.DOTALL | re.MULTILINE)
    return [block for block in blocks if "parity.fixes" in block]


FOUND = [(file, i, code) for file in ("README.md", "docs/fixes.md") for i, code in enumerate(snippets(file))]


def test_each_fix_has_its_snippet_of_few_lines():
    for file in ("README.md", "docs/fixes.md"):
        code = "\n".join(snippets(file))
        every = patches.__all__[1:] if file == "docs/fixes.md" else ["divide_by_accumulation"]  # README names one
        for name in ("apply", "FusedLinearGRPOLoss", "selective_log_probs", *every):
            assert re.search(rf"\b{name}\(", code), f"{file}: {name}"
    for file, _, code in FOUND:
        lines = [line for line in code.splitlines() if line.strip() and not line.startswith("from")]
        assert len(lines) <= 3 or file == "README.md", code


@pytest.fixture
def taken_back(monkeypatch):
    """Undoes every patch that was made, whatever the snippet kept of it."""
    made, logging = [], Patch.__post_init__
    monkeypatch.setattr(Patch, "__post_init__", lambda self: made.append(self) or logging(self))
    yield made
    for patch in reversed(made):
        patch.undo()


@pytest.mark.parametrize(("file", "place", "code"), FOUND, ids=[f"{file}-{i}" for file, i, _ in FOUND])
def test_it_runs(file, place, code, capsys, taken_back):
    torch.manual_seed(0)
    made = training.trainer(training.model(), max_steps=1)
    head = torch.nn.Linear(32, training.WORDS)
    names = {
        "trainer": made,
        "lm_head": head,
        "weight": head.weight,
        "hidden": torch.randn(2, 5, 32, requires_grad=True),
        "ids": torch.randint(training.WORDS, (2, 5)),
        "mask": torch.ones(2, 5),
        "advantages": torch.randn(2),
        "old": torch.full((2, 5), -2.0),
        "ref": torch.full((2, 5), -2.5),
    }
    exec(compile(code, file, "exec"), names)
    said = capsys.readouterr().out
    for name in re.findall(r"patches\.(\w+)\(", code):
        assert any(patch.name == name for patch in taken_back)
    if "apply(" in code:
        assert said.count("\n") == 12 == len(taken_back) - code.count("patches.")
    if re.search(r"^ *trainer\.train\(\)", code, re.MULTILINE):
        assert made.state.global_step == 1
    for name in {"logps", "entropies"} & set(names):
        assert names[name].shape == (2, 5)
        assert names[name].isfinite().all()
    if "loss" in names:
        (gradient,) = torch.autograd.grad(names["loss"], names["hidden"])
        assert gradient.isfinite().all()
        assert gradient.abs().sum() > 0
        assert "kl" in names["metrics"]
