"""A user's own function: what it declares, what it returns and what it raises is the user's, and said so."""

import dataclasses
import io

import pytest
import torch
from rich.console import Console

from cases.selftest.oracles import oracle_of
from cases.selftest.results import runs
from fixtures.kernels import right, scaled
from parity.errors import UsageError
from parity.implementations import user
from parity.judging.assess import classify, confirmed
from parity.protocol.call import execute
from parity.registry import NAMES, family, from_file, loss_family, run_case, select
from parity.results.report.summary import ABSENT
from parity.running.outcome import judge_run
from parity.running.plan import Options, check
from parity.sampling.capabilities import nearest, refusal
from parity.tools.replay import NO_JUDGEMENT, replay

pytestmark = pytest.mark.usefixtures("warm_workers")

FAMILY = family("logprobs")


def from_function(function, id):
    return user.from_function(function, id, [loss_family(name) for name in NAMES])


def chunked(hidden, weight, ids, temperature=1.0, chunk_size=1024):
    assert chunk_size == 1024, "None where the case has no chunk size"
    return right(hidden, weight, ids, temperature)


def unclipped(hidden, weight, ids, advantages, old_logps, mask, length):
    ratio = (right(hidden, weight, ids) - old_logps).exp() * advantages[:, None]
    return -((ratio * mask).sum(-1) / length.sum(-1)).mean()


def of_one_mask(hidden, weight, ids, advantages, old_logps, completion_mask):
    return unclipped(hidden, weight, ids, advantages, old_logps, completion_mask, completion_mask)


def of_two_masks(hidden, weight, ids, advantages, old_logps, completion_mask, tool_mask=None):
    mask = completion_mask * tool_mask
    return unclipped(hidden, weight, ids, advantages, old_logps, mask, mask)


def of_a_longer_length(hidden, weight, ids, advantages, old_logps, completion_mask, tool_mask=None):
    mask = completion_mask * tool_mask
    return unclipped(hidden, weight, ids, advantages, old_logps, mask, completion_mask)


@pytest.mark.parametrize(
    ("function", "agrees"), [(of_one_mask, True), (of_two_masks, True), (of_a_longer_length, False)]
)
def test_a_policy_loss_may_name_its_masks_as_trl_does(function, agrees):
    """Alone `completion_mask` is the mask, without a tool's tokens."""
    found = oracle_of(family("policy").case(3, "fp32", {"T": 9, "holes": True, "old": "inside"}))
    own = from_function(function, "own")
    outcome = execute(own, found.inputs)
    assert (own.family, outcome.verdict) == ("policy", "ran"), outcome.message
    assert confirmed(found, own, outcome)["loss"].agrees is agrees


def returned(what):
    def wrong(hidden, weight, ids):
        if isinstance(what, Exception):
            raise what
        return what

    return wrong


def oracle(**settings):
    return oracle_of(FAMILY.case(3, "fp32", settings))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("peak", "context"), [(1.0, "autocast"), (12.0, "autocast"), (12.0, "autocast_fp16")])
def test_plain_torch_agrees_under_autocast(seed, peak, context):
    """16-bit products, and on the CPU a log-softmax in 16 bits: autocast's, not the user's."""
    settings = {"context": context, "V": 257, "H": 7, "peak": peak, "temperature": 0.7}
    of = oracle_of(FAMILY.case(seed, "fp32", settings))
    own = from_function(right, "my_kernel.py:right")
    assert all(j.agrees for j in confirmed(of, own, execute(own, of.inputs)).values())
    assert own.recipe_for(oracle().inputs).describe() == "output=any"


def test_a_recipe_stays_what_it_says_beside_autocast():
    def narrow(hidden, weight, ids):
        return right(hidden, weight, ids)

    narrow.recipe = dataclasses.replace(from_function(right, "a.py:b").recipe_for(oracle().inputs), logits="input")
    own = from_function(narrow, "a.py:narrow")
    assert own.recipe_for(oracle_of(FAMILY.case(3, "bf16", {})).inputs).logits == "bf16"
    for context, dtype in (("autocast", "bf16"), ("autocast_fp16", "fp16")):
        under = own.recipe_for(oracle(context=context).inputs)
        assert (under.inputs, under.elementwise, under.softmax) == (dtype, dtype, dtype)


def test_what_autocast_explains_is_precision():
    """An error of bf16's size in a float32 case under autocast, from a function that claims float32 there."""
    own = from_function(right, "my_kernel.py:right")
    strict = dataclasses.replace(own, recipe=own.recipe_for(oracle().inputs))
    of = oracle(context="autocast", V=257, H=7, temperature=0.05)
    wrong = from_function(scaled, "my_kernel.py:scaled")
    assert classify(of, strict, ["logps"]) == {"logps": "precision"}
    assert classify(of, wrong, ["logps"]) == {"logps": "logic"}


def lifted(hidden, weight, ids):
    """Logits that cancel: float32 loses their last digits."""
    logits = (hidden.float() @ weight.float().T + 1e5) - 1e5
    return torch.log_softmax(logits, -1).gather(-1, ids.long().unsqueeze(-1)).squeeze(-1)


def test_what_the_same_code_has_right_in_float64_is_precision():
    of, own = oracle(), from_function(lifted, "my_kernel.py:lifted")
    assert not confirmed(of, own, execute(own, of.inputs))["logps"].agrees
    assert classify(of, own, ["logps"]) == {"logps": "precision"}
    wrong = from_function(lambda hidden, weight, ids: 1.001 * lifted(hidden, weight, ids), "my_kernel.py:wrong")
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
    outcome = execute(from_function(returned(what), "my_kernel.py:wrong"), oracle().inputs)
    assert outcome.verdict == verdict
    assert says in outcome.message
    assert outcome.blame != "harness"


SMALL = {"B": 3, "T": 6, "V": 11, "H": 5, "peak": 2.0, "grad": "hidden weight"}


def judged(function, **settings):
    """Quantity -> row of a function on a small policy case."""
    policy = loss_family("policy")
    fixed = {"cotangent": "ones", "beta": 0.04, "old": "inside", "ref": "apart"}
    case = policy.case(3, "fp32", SMALL | fixed | settings)
    rows = list(run_case(case, [from_function(function, "my.py:own")], thorough=False))
    return {r.quantity: r for r in rows}


def grpo(hidden, weight, ids, mask, advantages, beta=0.0, old_logps=None, ref_logps=None):
    """Loss, KL and clip fraction of GRPO as a user returns them."""
    logps = torch.log_softmax(hidden @ weight.T, -1).gather(-1, ids.long()[..., None])[..., 0]
    ratio = torch.exp(logps - old_logps)
    a, m = advantages[:, None], mask.float()
    kl = torch.exp(ref_logps - logps) - (ref_logps - logps) - 1
    terms = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a) + beta * kl
    clipped = ((ratio < 0.8) & (a < 0)) | ((ratio > 1.2) & (a > 0))
    mean = lambda values: (values * m).sum() / m.sum()  # noqa: E731
    return ((terms * m).sum(-1) / m.sum(-1)).mean(), mean(kl), mean(clipped.float())


@pytest.mark.parametrize("number", [False, True])
def test_metrics_are_judged_though_nothing_declares_them(number):
    """A doubled KL used to agree in silence, with exit code 0."""

    def metrics(factor):
        def own(hidden, weight, ids, mask, advantages, beta=0.0, old_logps=None, ref_logps=None):
            loss, kl, clipped = grpo(hidden, weight, ids, mask, advantages, beta, old_logps, ref_logps)
            told = {"kl": factor * kl.detach(), "clip_ratio": clipped, "lr": 1e-6, "texts": ["a"]}
            return loss, {k: v.item() if number and torch.is_tensor(v) else v for k, v in told.items()}

        return own

    right, wrong = judged(metrics(1.0)), judged(metrics(2.0))
    assert {right[q].verdict for q in ("loss", "kl", "clip_ratio", "grad_weight")} == {"agree"}
    assert wrong["kl"].verdict == "disagree" and wrong["loss"].verdict == "agree"
    assert right["protocol"].unjudged == ["lr", "texts"]


def test_an_unnamed_second_tensor_is_an_output_only_where_there_is_one_it_can_be():
    def with_logps(hidden, weight, ids, mask, advantages, beta=0.0, old_logps=None, ref_logps=None):
        return grpo(hidden, weight, ids, mask, advantages, beta, old_logps, ref_logps)[0], old_logps

    rows = judged(with_logps)
    assert "kl" not in rows and rows["protocol"].unjudged == ["value 2"]

    def with_entropy(factor):
        def own(hidden, weight, ids):
            z = torch.log_softmax(hidden @ weight.T, -1)
            return z.gather(-1, ids[..., None])[..., 0], -factor * (z.exp() * z).sum(-1)

        return own

    case = FAMILY.case(3, "fp32", {"entropy": "gradient"})
    for factor, verdict in ((1.0, "agree"), (2.0, "disagree")):
        rows = run_case(case, [from_function(with_entropy(factor), "my.py:own")], thorough=False)
        found = {r.quantity: r.verdict for r in rows}
        assert found["entropy"] == found["grad_hidden"] == verdict


@pytest.mark.parametrize(
    ("change", "quantity", "says"),
    [
        (lambda loss: loss[None], "loss", "shape (1,), expected ()"),
        (lambda loss: loss.long(), "loss", "expected a floating-point one"),
        (lambda loss: (loss * 0).expand(3, 6), "loss", "shape (3, 6), expected ()"),
        (lambda loss: loss.detach(), "grad_hidden", "no gradient"),
        (lambda loss: {"kl": loss}, None, "returned kl without loss"),
        (lambda loss: {"loss": "0.3"}, None, "without loss"),
        (lambda loss: int("x"), None, "ValueError: invalid literal"),
        (lambda loss: {}["x"], None, "KeyError"),
    ],
)
def test_a_wrong_shape_or_type_or_an_exception_is_a_verdict(change, quantity, says):
    def own(hidden, weight, ids, mask, advantages, beta=0.0, old_logps=None, ref_logps=None):
        return change(grpo(hidden, weight, ids, mask, advantages, beta, old_logps, ref_logps)[0])

    row = judged(own)[quantity]
    assert row.failing and says in row.message, row.message


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda logps: logps[:, None], "expected (3, 6)"),
        (lambda logps: logps.view(1, -1), "expected (3, 6)"),
        (lambda logps: None, "returned NoneType as logps"),
        (lambda logps: {}["logps"], "KeyError"),
    ],
    ids=["a dimension more", "transposed", "nothing", "a lookup that fails"],
)
def test_what_a_library_returns_wrong_is_its_verdict_and_no_adapter_repairs_it(monkeypatch, change, says):
    """`view` made a log-prob per token of whatever had as many entries, and None was "unsupported"."""
    module = pytest.importorskip("liger_kernel.chunked_loss.fused_linear_ppo")
    original = module._ChunkedSelectiveLogProbFunction

    class Wrong:
        @staticmethod
        def apply(*args):
            return change(original.apply(*args))

    monkeypatch.setattr(module, "_ChunkedSelectiveLogProbFunction", Wrong)
    case = FAMILY.case(3, "fp32", SMALL)
    rows = list(run_case(case, select(["liger.chunked_selective_logprob"]), thorough=False))
    row = next(r for r in rows if r.quantity == "logps" or r.quantity is None)
    assert row.failing and says in row.message and row.blame != "harness", row


def test_none_does_not_replace_a_default():
    assert execute(from_function(chunked, "a.py:chunked"), oracle().inputs).verdict == "ran"


def row(verdict, message="", name="own"):
    return runs.row("logprobs-1", None, verdict, family="logprobs", implementation=name, message=message)


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
    code, reasons = judge_run(options, rows, [], "cpu")
    assert code == 3
    assert reasons == [f"{spec}: nothing was compared, refused: not for you"]
    assert judge_run(options, [*rows, row("agree", name=spec)], [], "cpu")[0] == 0
    assert judge_run(options, [*rows, row("crashed", "boom", spec)], [], "cpu")[0] == 1
    assert "no case was drawn" in judge_run(options, [reference], [], "cpu")[1][0]


def test_settings_that_no_case_has_together_are_said(tmp_path):
    """IPO divides by length already: no case has its mean besides."""
    text = "def own(hidden, weight, ids, ref_hidden, ref_weight, beta): ...\n"
    spec = own_file(tmp_path, text + "own.fixed = {'loss_type': 'ipo', 'average': True}\n")
    ipo, _ = loss_family("preference").settled(1, "fp32", {"loss_type": "ipo", "average": True})
    rows = list(run_case(ipo, from_file(spec), thorough=False))
    _, reasons = judge_run(Options(implementations=(spec,)), [row("agree"), *rows], [], "cpu")
    (said,) = reasons
    assert "written for loss_type ipo" in said and said.endswith("no case here has these settings together")
    other = [*rows, row("unsupported", "no bias", spec)]
    assert "together" not in judge_run(Options(implementations=(spec,)), [row("agree"), *other], [], "cpu")[1][0]


def test_an_implementation_in_a_file_is_known_by_its_own_id(tmp_path):
    imported = "from parity.implementations.implementation import Implementation\n"
    text = imported + "own = Implementation('mine', 'logprobs', 'candidate', len)\n"
    options = Options(implementations=(own_file(tmp_path, text),))
    assert judge_run(options, [row("agree", name="mine")], [], "cpu") == (0, [])
    code, reasons = judge_run(options, [row("agree", name="trl.selective_log_softmax")], [], "cpu")
    assert (code, reasons) == (3, ["mine: nothing was compared, no case was drawn for it"])


def test_a_name_that_is_not_there(tmp_path):
    file = tmp_path / "own.py"
    file.write_text("TABLE = 3\nclass Own: pass\ndef right(hidden, weight, ids): ...\n")
    with pytest.raises(UsageError, match=r"no 'wrong' in .*; functions and classes there: Own, right"):
        from_file(f"{file}:wrong")
    with pytest.raises(UsageError, match="'TABLE' in .* is not callable"):
        from_file(f"{file}:TABLE")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("def f(logits, labels): pass", "labels, logits fit no family.*can be wrapped"),
        ("import torch; f = torch.nn.Linear(2, 2)", "its parameters input fit no family"),
        ("def f(*args): pass", "parameters have no names"),
        ("def f(hidden, weight, ids): pass\nf.recipe = 'bf16'", "f.recipe is 'bf16', expected a Recipe"),
    ],
)
def test_what_cannot_be_called_says_what_to_do(tmp_path, body, says):
    (tmp_path / "mine.py").write_text(body)
    with pytest.raises(UsageError, match=says):
        select([f"{tmp_path}/mine.py:f"])


@pytest.mark.parametrize(
    ("made", "code"),
    [
        ("functools.partial(logps, scale=1.0)", "logps"),
        ("Module()", "Module"),
        ("torch.compile(Module(), backend='eager')", "OptimizedModule"),
        ("Callable()", "Callable"),
        ("Callable().__call__", "Callable.__call__"),
    ],
)
def test_whatever_can_be_called_by_names_is_judged(tmp_path, made, code):
    (tmp_path / "mine.py").write_text(f"""import functools, torch
def logps(hidden, weight, ids, scale):
    return (scale * hidden @ weight.T).log_softmax(-1).gather(-1, ids[..., None])[..., 0]
class Module(torch.nn.Module):
    def forward(self, hidden, weight, ids):
        return logps(hidden, weight, ids, 1.0)
class Callable:
    def __call__(self, hidden, weight, ids):
        return logps(hidden, weight, ids, 1.0)
f = {made}
""")
    (mine,) = from_file(f"{tmp_path}/mine.py:f")
    assert mine.sources[0].endswith(f".{code}") and verdicts(mine) == {"agree"}


def verdicts(mine, **settings):
    """Those of a user's function on a case of its family."""
    return {r.verdict for r in run_case(loss_family(mine.family).case(3, "fp32", settings), [mine], thorough=False)}


OPEN = """from torch.nn.functional import cross_entropy
def f(hidden, weight, ids, {named}**others):
    z = (hidden @ weight.T / others["temperature"]).flatten(0, 1)
    return -cross_entropy(z, ids.flatten(), reduction="none"{given}).view_as(ids)
"""


@pytest.mark.parametrize(
    ("named", "given", "found"),
    [
        ("", "", {"unsupported"}),
        ("smoothing, ", ", label_smoothing=smoothing", {"agree"}),
        ("label_smoothing=0.0, ", ", label_smoothing=label_smoothing", {"agree"}),
        ("smoothing, ", "", {"agree", "disagree"}),
    ],
)
def test_what_few_functions_take_is_given_by_name_alone(tmp_path, named, given, found):
    """A new such setting makes no function wrong that takes any keyword."""
    (tmp_path / "mine.py").write_text(OPEN.format(named=named, given=given))
    (mine,) = from_file(f"{tmp_path}/mine.py:f")
    assert verdicts(mine, temperature=0.5) == {"agree"}
    assert verdicts(mine, temperature=0.5, smoothing=0.25) == found
    near = nearest(mine, FAMILY.case(3, "fp32", {"smoothing": 0.25}), "cpu")
    assert ("smoothing" in near.settings) == ("agree" in found)


PREFERENCE = """import torch
def logps(h, w, ids):
    lp = (h @ w.T).log_softmax(-1).gather(-1, ids.clamp(min=0)[..., None])[..., 0]
    return lp.mul(ids != -100).sum(-1)
"""


def test_a_preference_loss_has_a_beta_as_a_distillation_loss_has(tmp_path):
    (tmp_path / "mine.py").write_text(f"""{PREFERENCE}
def dpo(hidden, weight, ids, ref_hidden, ref_weight, beta):
    chosen, rejected = (logps(hidden, weight, ids) - logps(ref_hidden, ref_weight, ids).detach()).chunk(2)
    return -torch.nn.functional.logsigmoid(beta * (chosen - rejected)).mean()
""")
    (mine,) = from_file(f"{tmp_path}/mine.py:dpo")
    assert mine.family == "preference" and verdicts(mine) == {"agree"}


REFERENCE = ", ref_hidden, ref_weight, labels"


@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize(
    ("method", "parameters", "body"),
    [
        ("cpo", "", "x = logps(hidden, weight, ids)"),
        ("orpo", "", "m = logps(hidden, weight, ids) / (ids != -100).sum(-1); x = m - (-m.expm1()).log()"),
        ("kto", REFERENCE, "r = logps(hidden, weight, ids) - logps(ref_hidden, ref_weight, ids)"),
    ],
)
def test_a_preference_loss_without_a_method_is_judged_on_its_own(tmp_path, method, parameters, body, wrong):
    loss = {
        "cpo": "-torch.nn.functional.logsigmoid(beta * (x.chunk(2)[0] - x.chunk(2)[1])).mean()",
        "orpo": "-beta * torch.nn.functional.logsigmoid(x.chunk(2)[0] - x.chunk(2)[1]).mean()",
        "kto": "torch.where(labels, (-beta * r).sigmoid(), (beta * r).sigmoid()).mean()",
    }[method]
    fixed = f"f.fixed = {{'method': '{method}'}}" if method != "kto" else ""
    (tmp_path / "mine.py").write_text(
        f"{PREFERENCE}def f(hidden, weight, ids, beta{parameters}):\n    {body}\n    return {loss}{'* 1.01' * wrong}\n{fixed}\n"
    )
    (mine,) = from_file(f"{tmp_path}/mine.py:f")
    settings = {"method": method} | ({"loss_type": "kto", "reference": "head"} if method == "kto" else {})
    cases = [loss_family("preference").case(n, "fp32", settings) for n in range(3)]
    rows = [row for case in cases for row in run_case(case, [mine], thorough=False)]
    assert {r.verdict for r in rows if r.quantity == "loss"} == {"disagree" if wrong else "agree"}
    drawn = loss_family("preference").case(3, "fp32", {"loss_type": "hinge"})
    assert nearest(mine, drawn, "cpu").settings["method"] == method


def test_a_preference_loss_that_may_be_of_two_methods_says_which(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def f(hidden, weight, ids, beta, nll=0.0): pass\ndef g(hidden, weight, ids): pass\ng.fixed = {'x': 1}"
    )
    with pytest.raises(UsageError, match=r"CPO's or ORPO's: say which, yours.fixed = \{'method': 'cpo'\}"):
        from_file(f"{tmp_path}/mine.py:f")
    with pytest.raises(
        UsageError, match="fixed names x, no setting of logprobs, .* divergence: hidden, weight, beta, teacher"
    ):
        from_file(f"{tmp_path}/mine.py:g")


@pytest.mark.parametrize("knows", [False, True])
def test_a_teacher_with_a_longer_vocabulary_is_given_to_who_has_a_parameter_for_it(knows):
    def loss(hidden, weight, ids, teacher_hidden, teacher_weight, beta=0.5):
        raise ValueError("called")

    def longer(hidden, weight, ids, teacher_hidden, teacher_weight, beta=0.5, extra_vocabulary=0):
        raise ValueError("called")

    case = loss_family("divergence").case(0, "fp32", {"extra_vocabulary": 2, "bias": "none", "teacher_bias": "none"})
    outcome = execute(from_function(longer if knows else loss, "f"), oracle_of(case).inputs)
    assert (outcome.verdict == "unsupported") is not knows
    assert ("called" if knows else "no parameter extra_vocabulary") in outcome.message
    assert bool(ABSENT.search(outcome.message)) is not knows, "the note of a report counts what is absent"


def test_a_distillation_loss_under_autocast_to_float16_is_judged_on_a_gpu_alone():
    def loss(hidden, weight, ids, teacher_hidden, teacher_weight, beta=0.5):
        raise ValueError("called")

    case = loss_family("divergence").case(0, "fp32", {"context": "autocast_fp16"})
    own = from_function(loss, "my.py:loss")
    assert "no recipe describes it" in str(refusal(own, case, "cpu")) and refusal(own, case, "cuda") is None


def test_a_function_of_another_family_than_asked_for_is_named(tmp_path):
    (tmp_path / "mine.py").write_text("def f(hidden, weight, ids): pass")
    with pytest.raises(UsageError, match="f is of family logprobs, and --family names policy"):
        check(Options(implementations=(f"{tmp_path}/mine.py:f",), families=("policy",)))


def test_a_trainer_is_asked_for_by_either_of_its_families(tmp_path):
    (tmp_path / "mine.py").write_text("from trl import GRPOTrainer\nclass T(GRPOTrainer): pass")
    for name in ("grpo-trainer", "policy"):
        check(Options(implementations=(f"{tmp_path}/mine.py:T",), families=(name,)))
    with pytest.raises(UsageError, match="T is of family grpo-trainer and policy, and --family names logprobs"):
        check(Options(implementations=(f"{tmp_path}/mine.py:T",), families=("logprobs",)))


def test_replay_of_a_function_that_refuses_is_no_agreement(tmp_path):
    """The reference beside it agrees: that says nothing about the function."""
    (tmp_path / "mine.py").write_text("def f(hidden, weight, ids): raise ValueError('no')")
    quiet, case = Console(file=io.StringIO()), "cases/regressions/all-ignored.json"
    assert replay(case, [f"{tmp_path}/mine.py:f"], "cpu", False, quiet) == NO_JUDGEMENT


def test_a_tensor_without_default_is_always_there_if_the_first_case_has_it():
    """A reference of none was given as None, and the crash was the function's. A bias is None in the first case."""

    def kto(hidden, weight, ids, beta, labels, ref_hidden, ref_weight, bias):
        raise ValueError("called")

    mine, preference = from_function(kto, "my.py:kto"), loss_family("preference")
    settings = {"method": "kto", "loss_type": "kto"}
    with_it, without = (preference.case(3, "fp32", settings | {"reference": r}) for r in ("head", "none"))
    assert refusal(mine, with_it, "cpu") is None
    assert refusal(mine, without, "cpu") == "ref_hidden, ref_weight without default, and the case has none"
    assert execute(mine, oracle_of(without).inputs).verdict == "unsupported"
    assert nearest(mine, without, "cpu") == with_it


def test_draws_are_moved_to_the_choices_that_a_function_has_as_defaults():
    """It refuses the family's: with those nothing was compared."""

    def simpo(hidden, weight, ids, beta, gamma=0.5, loss_type="simpo"):
        raise NotImplementedError(loss_type)

    simpo.fixed = {"method": "cpo"}
    drawn = loss_family("preference").case(3, "fp32", {"loss_type": "hinge", "divergence": "js_divergence"})
    assert nearest(from_function(simpo, "my.py:simpo"), drawn, "cpu").settings["loss_type"] == "hinge"
    drawn = loss_family("preference").case(3, "fp32", {"divergence": "js_divergence"})
    assert nearest(from_function(simpo, "my.py:simpo"), drawn, "cpu").settings["loss_type"] == "simpo"


def test_a_divergence_without_labels_gets_cases_without_them():
    """It needed `ids` to be recognised, and was then called wrong for not knowing that -100 is no label."""

    def reverse_kl(hidden, weight, teacher_hidden, teacher_weight, num_items_in_batch=None):
        p = torch.log_softmax(hidden.float() @ weight.float().T, -1)
        q = torch.log_softmax(teacher_hidden.detach().float() @ teacher_weight.detach().float().T, -1)
        items = p[..., 0].numel() if num_items_in_batch is None else num_items_in_batch
        return (p.exp() * (p - q)).sum() / items

    reverse_kl.fixed = {"beta": 1.0}
    mine, family = from_function(reverse_kl, "my.py:reverse_kl"), loss_family("divergence")
    ignored = family.case(3, "fp32", {"beta": 1.0, "ignored": "some"})
    assert refusal(mine, ignored, "cpu") == "no parameter ids"
    near = nearest(mine, ignored, "cpu")
    assert {row.verdict for row in run_case(near, [mine], thorough=False) if row.quantity} == {"agree"}


def test_draws_are_moved_to_a_number_beside_the_kind_of_teacher_that_a_function_takes():
    """A forward KL of the teacher's logits got no case of quick: no draw had both."""

    def kl(hidden, weight, teacher_logits, ids): ...

    kl.fixed = {"beta": 0.0}
    drawn = loss_family("divergence").case(3, "fp32", {"softcap": 5.0})
    found = nearest(from_function(kl, "my.py:kl"), drawn, "cpu")
    assert {"beta": 0.0, "teacher": "logits"}.items() <= found.settings.items()


def test_settings_that_do_not_stand_together_are_no_case_of_a_function(monkeypatch):
    """A run ended with CISPO's upper clip of 0, which was drawn for another loss."""

    def loss(hidden, weight, ids, mask, advantages, num_items_in_batch, old_logps=None, epsilon_high=None): ...

    loss.fixed = {"loss_type": "cispo"}
    monkeypatch.setattr("parity.sampling.capabilities._BUILT", {})
    own, policy = from_function(loss, "my.py:loss"), loss_family("policy")
    drawn, cispo = (policy.case(3, "fp32", {"epsilon_high": 0.0} | more) for more in ({}, loss.fixed))
    assert "epsilon_high=0 must be positive" in str(refusal(own, cispo, "cpu"))
    assert nearest(own, drawn, "cpu") is not None
