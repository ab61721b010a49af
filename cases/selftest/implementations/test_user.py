"""A user's own function: what it declares, what it returns and what it raises is the user's, and said so."""

import dataclasses

import pytest
import torch

from parity.errors import UsageError
from parity.implementations import user
from parity.judging.assess import classify, confirmed
from parity.judging.execute import execute
from parity.registry import NAMES, bench_of, family, from_file, loss_family
from parity.results.row import Row
from parity.running.run import Options, judge_run

FAMILY = family("logprobs")


def from_function(function, id):
    return user.from_function(function, id, [loss_family(name) for name in NAMES])


def my_loss(hidden, weight, ids, temperature=1.0, softcap=None):
    """The README's example."""
    logits = hidden.float() @ weight.float().T
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return torch.log_softmax(logits / temperature, -1).gather(-1, ids.long().unsqueeze(-1)).squeeze(-1)


def offset(hidden, weight, ids, temperature=1.0):
    """Log-probs off by a thousandth."""
    return my_loss(hidden, weight, ids, temperature) * 1.001


def chunked(hidden, weight, ids, temperature=1.0, chunk_size=1024):
    assert chunk_size == 1024, "None where the case has no chunk size"
    return my_loss(hidden, weight, ids, temperature)


def returned(what):
    def wrong(hidden, weight, ids):
        if isinstance(what, Exception):
            raise what
        return what

    return wrong


def bench(**settings):
    return bench_of(FAMILY.case(3, "fp32", settings))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("peak", [1.0, 12.0])
def test_plain_torch_agrees_under_autocast(seed, peak):
    """bf16 products, and on the CPU a log-softmax in bf16: autocast's, not the user's."""
    settings = {"context": "autocast", "V": 257, "H": 7, "peak": peak, "temperature": 0.7}
    of = bench_of(FAMILY.case(seed, "fp32", settings))
    own = from_function(my_loss, "my_kernel.py:my_loss")
    assert all(j.agrees for j in confirmed(of, own, execute(own, of.inputs)).values())
    assert own.recipe_for(bench().inputs).describe() == "output=any"


def test_a_recipe_stays_what_it_says_beside_autocast():
    def narrow(hidden, weight, ids):
        return my_loss(hidden, weight, ids)

    narrow.recipe = dataclasses.replace(from_function(my_loss, "a.py:b").recipe_for(bench().inputs), logits="input")
    own = from_function(narrow, "a.py:narrow")
    assert own.recipe_for(bench_of(FAMILY.case(3, "bf16", {})).inputs).logits == "bf16"
    under = own.recipe_for(bench(context="autocast").inputs)
    assert (under.inputs, under.elementwise, under.softmax) == ("bf16", "bf16", "bf16")


def test_what_autocast_explains_is_precision():
    """An error of bf16's size in a float32 case under autocast, from a function that claims float32 there."""
    own = from_function(my_loss, "my_kernel.py:my_loss")
    strict = dataclasses.replace(own, recipe=own.recipe_for(bench().inputs))
    of = bench(context="autocast", V=257, H=7, temperature=0.05)
    wrong = from_function(offset, "my_kernel.py:offset")
    assert classify(of, strict, ["logps"]) == {"logps": "precision"}
    assert classify(of, wrong, ["logps"]) == {"logps": "logic"}


@pytest.mark.parametrize(
    ("what", "verdict", "says"),
    [
        (None, "crashed", "returned NoneType, expected a tensor"),
        (1.0, "crashed", "returned float, expected a tensor"),
        ((), "crashed", "returned tuple, expected a tensor"),
        (KeyError("my_table"), "crashed", "my_table"),
        (TypeError("no len"), "crashed", "TypeError: no len"),
        (RuntimeError("boom"), "crashed", "RuntimeError: boom"),
        (NotImplementedError("not for you"), "refused", "not for you"),
        (ValueError("V must be even"), "refused", "V must be even"),
    ],
)
def test_what_it_returns_and_raises(what, verdict, says):
    outcome = execute(from_function(returned(what), "my_kernel.py:wrong"), bench().inputs)
    assert outcome.verdict == verdict
    assert says in outcome.message
    assert outcome.blame != "harness"


def test_none_does_not_replace_a_default():
    assert execute(from_function(chunked, "a.py:chunked"), bench().inputs).verdict == "ran"


def row(verdict, message="", name="own"):
    where = {"case": "logprobs-1", "family": "logprobs", "dtype": "fp32", "device": "cpu"}
    return Row(**where, implementation=name, verdict=verdict, message=message)


def own_file(tmp_path, text):
    """FILE.py:own of a file with this text."""
    file = tmp_path / "my_kernel.py"
    file.write_text(text)
    return f"{file}:own"


def test_own_code_that_was_never_compared_is_no_success(tmp_path):
    """The reference was compared, and exit code 0 would say that the user's function agrees."""
    spec = own_file(tmp_path, "def own(hidden, weight, ids): ...\n")
    options = Options(implementations=(spec,))
    reference = row("agree", name="trl.selective_log_softmax")
    unsupported = row("unsupported", "no bias", spec)
    rows = [reference, unsupported, unsupported, row("refused", "not for you", spec)]
    code, reasons = judge_run(options, rows, [], [], "cpu")
    assert code == 3
    assert reasons == [f"{spec}: nothing was compared, refused: not for you"]
    assert judge_run(options, [*rows, row("agree", name=spec)], [], [], "cpu")[0] == 0
    assert judge_run(options, [*rows, row("crashed", "boom", spec)], [], [], "cpu")[0] == 1
    assert "no case was drawn" in judge_run(options, [reference], [], [], "cpu")[1][0]


def test_an_implementation_in_a_file_is_known_by_its_own_id(tmp_path):
    imported = "from parity.implementations.implementation import Implementation\n"
    text = imported + "own = Implementation('mine', 'logprobs', 'candidate', len)\n"
    options = Options(implementations=(own_file(tmp_path, text),))
    assert judge_run(options, [row("agree", name="mine")], [], [], "cpu") == (0, [])
    code, reasons = judge_run(options, [row("agree", name="trl.selective_log_softmax")], [], [], "cpu")
    assert (code, reasons) == (3, ["mine: nothing was compared, no case was drawn for it"])


def test_a_name_that_is_not_there(tmp_path):
    file = tmp_path / "own.py"
    file.write_text("TABLE = 3\nclass Own: pass\ndef right(hidden, weight, ids): ...\n")
    with pytest.raises(UsageError, match=r"no 'wrong' in .*; functions and classes there: Own, right"):
        from_file(f"{file}:wrong")
    with pytest.raises(UsageError, match="'TABLE' in .* is not callable"):
        from_file(f"{file}:TABLE")
