"""`parity replay --test`: a finding as a test for the user's own repository."""

import pytest
from click.testing import CliRunner

from fixtures import warm
from parity.cli.commands import main

pytestmark = pytest.mark.usefixtures("warm_workers")

LOSS = """
import torch


def loss(hidden, weight, ids):
    logits = hidden.float() @ weight.float().T
    return torch.log_softmax(logits, -1).gather(-1, ids.long().unsqueeze(-1)).squeeze(-1){error}
"""


@pytest.fixture
def repository(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(LOSS.format(error=" * 1.01"))
    (tmp_path / "case.json").write_text(
        '{"schema": 1, "family": "logprobs", "seed": 3, "dtype": "fp32", "settings": {}}'
    )
    return tmp_path


def parity(*words):
    return CliRunner().invoke(main, ["replay", "case.json", *words])


def outcome_in(folder):
    found = warm.run("pytest", "-q", "test_kept.py", cwd=folder / "tests")
    return found.returncode, found.stdout


def test_the_test_fails_until_the_loss_is_mended(repository):
    said = parity("--implementation", "mine.py:loss", "--test", "tests/test_kept.py").output
    assert "wrote tests/test_kept.py: python -m pytest tests/test_kept.py" in said
    code, output = outcome_in(repository)
    assert code == 1 and "1.01 times the definition" in output, output
    (repository / "mine.py").write_text(LOSS.format(error=""))
    code, output = outcome_in(repository)
    assert code == 0 and "1 passed" in output, output


def test_it_writes_over_nothing_and_asks_for_one_implementation(repository):
    assert parity("--test", "t.py").exit_code == 125
    (repository / "t.py").write_text("")
    done = parity("--implementation", "mine.py:loss", "--test", "t.py")
    assert done.exit_code == 125 and (repository / "t.py").read_text() == ""
