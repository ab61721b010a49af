"""What implementations declare to take is true, and they get cases accordingly: every pair that they take is met."""

import collections
import dataclasses
import itertools

import pytest
import torch

from cases.selftest.oracles import oracle_of
from parity.case.case import Case, covering
from parity.case.drawing import cases, draws
from parity.case.profiles import PROFILES, streams
from parity.errors import HarnessError
from parity.implementations import limits as limits_module
from parity.implementations import trl as trl_module
from parity.implementations import user
from parity.implementations.implementation import Implementation
from parity.implementations.limits import fitting, found_at, only, require, taking
from parity.protocol.call import execute
from parity.registry import load, loss_families, loss_family, run_case, select
from parity.results.ledger import Ledger
from parity.running import shard as shard_module
from parity.running.plan import DTYPES, Judged, Options, Shard, planned
from parity.running.shard import Session
from parity.sampling import capabilities
from parity.sampling.capabilities import besides, nearest, refusal

LARGEST = 400
"""Blocks of logits of a case that the kernels are shown here."""


def drawn_of(family, count):
    found = draws(cases(family, DTYPES, "pr"), f"declared/{family.name}", count)
    sizes = ((case, family.full_settings(case)) for case in found)
    return [case for case, s in sizes if s.B * s.T * (1 + s.V // 64) < LARGEST and s.__dict__["context"] != "compile"]


@pytest.mark.parametrize("name", loss_families())
def test_what_is_declared_as_taken_runs(name):
    """The only place where an implementation is tried. `nearest` has more of them meet narrow kernels."""
    family = loss_family(name)
    drawn, refused = drawn_of(family, 60), []
    count = collections.Counter()
    for i in select(()):
        most = 2 if "compile" in i.id else 4 if i.every > 1 or i.interpreted else 12
        compiled = i.interpreted and torch.cuda.is_available()  # by Triton, for CUDA alone
        there = not i.missing() and not compiled
        for case in drawn if i.family == name and there else ():
            near = nearest(i, case, "cpu") if count[i.id] < most else None
            if near is not None:
                count[i.id] += 1
                outcome = execute(i, oracle_of(near, "cpu").offered(i).inputs)
                if outcome.verdict != "ran" and not outcome.message.startswith(("no labels", "Triton's interpreter")):
                    refused.append((i.id, near.settings, outcome.verdict, outcome.message))
    for one in refused:
        print(one)
    assert not refused
    assert len(count) >= 5 and min(count.values()) >= 2


def test_a_setting_that_the_installed_function_lacks_is_refused_before_the_call_and_loud_within():
    def loss(hidden, weight):
        pass

    limit = fitting(f"{__name__}:lacks", lambda s: {"bias": (s.bias, "none")})
    globals()["lacks"] = loss
    kernel = Implementation("own", "logprobs", "candidate", lambda x: {}, limits=(limit,))
    case = Case("logprobs", 3, "fp32", {"bias": "random"})
    assert refusal(kernel, case, "cpu") == "no bias parameter in the installed version"
    assert refusal(kernel, Case("logprobs", 3, "fp32"), "cpu") is None
    rows = list(run_case(case, [kernel], thorough=False))
    assert [(r.verdict, r.message) for r in rows] == [("unsupported", "no bias parameter in the installed version")]
    with pytest.raises(HarnessError, match="declared as taken"):
        taking(loss, {"bias": (1, None)})


@pytest.mark.parametrize("average", [False, True])
def test_a_release_that_does_not_say_mean_or_sum_is_taken_for_the_definition(average, monkeypatch):
    """Liger's DPO up to 0.5.8 takes means, and was refused for want of the parameter."""
    import liger_kernel.chunked_loss as module

    newer = module.LigerFusedLinearDPOLoss

    class Older(newer):
        def __init__(self, ignore_index, beta, compute_nll_loss, compiled, use_ref_model, chunk_size=1):
            super().__init__(ignore_index, beta, 1.0, compute_nll_loss, compiled, use_ref_model, True, chunk_size)

    monkeypatch.setattr(module, "LigerFusedLinearDPOLoss", Older)
    found_at.cache_clear()
    case = Case("preference", 3, "fp32", {"average": average})
    row = next(iter(run_case(case, [load()["liger.FusedLinearDPOLoss"]], thorough=False)))
    found_at.cache_clear()
    assert row.verdict == ("unsupported" if average else "disagree"), row.message


MANY = {"beta": 0.5, "softcap": 5.0, "bias": "random", "temperature": 0.7, "layouts": "mixed", "ignored": "some"}
MANY |= {"peak": 4.0}


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("liger.fused_linear_kl_div", {"temperature", "layouts", "ignored", "peak"}),
        ("trl.generalized_jsd_loss", {"beta", "temperature", "bias", "layouts", "ignored", "peak", "softcap"}),
    ],
)
def test_what_is_refused_goes_back_and_the_rest_stays(name, kept):
    (chosen,) = select([name])
    near = nearest(chosen, Case("divergence", 3, "fp32", MANY), "cpu")
    assert {k for k, v in near.settings.items() if MANY.get(k) == v} == kept
    rows = list(run_case(near, [chosen], thorough=False))
    assert rows and not {row.verdict for row in rows} & {"unsupported", "refused"}


OLDER = {
    "trl.trainer.grpo_config": "Liger loss does not support two-sided GRPO loss yet.",
    "trl.trainer.grpo_trainer": """
        Liger Kernels don't currently support masking token positions based on entropy.
        Liger Kernels currently only support token-level importance sampling.
        if self.loss_type == "grpo" or self.loss_type in ["bnpo", "dr_grpo"]:
        raise ValueError(f"Unknown loss type: {self.loss_type}")""",
}
"""What the source of TRL 0.22 says, by module."""


@pytest.mark.parametrize(
    ("name", "refused"),
    [
        ("trl.GRPOTrainer", {"loss_type": "luspo"}),
        ("trl.GRPOTrainer.liger", {"loss_type": "dapo"}),
        ("trl.GRPOTrainer.liger", {"delta": 3.0}),
        ("trl.GRPOTrainer.liger", {"importance_sampling_level": "sequence"}),
        ("trl.GRPOTrainer.liger", {"entropy_quantile": True}),
    ],
)
def test_what_an_older_release_refuses_within_the_call_is_known_before_it(name, refused, monkeypatch):
    monkeypatch.setattr(limits_module, "says", lambda module, text: text in OLDER.get(module, ""))
    trainer = dataclasses.replace(load()[name], limits=())
    kept = {"temperature": 0.7, "epsilon": 0.1}
    case = Case("policy", 3, "fp32", kept | refused)
    assert refusal(trainer, case, "cpu").startswith("it refuses: ")
    assert nearest(trainer, case, "cpu").settings == kept
    drawn = drawn_of(loss_family("policy"), 100)
    own = [case for case in drawn if refusal(trainer, case, "cpu") is None]
    moved, *_ = besides(trainer, drawn, lambda case: True, 60, "cpu")
    assert len(own) + len(moved) >= 60
    assert {near.settings.get("loss_type", "grpo") for near in [*own, *moved]} == {"grpo", "bnpo", "dr_grpo"}


def test_a_release_without_an_entropy_gets_log_probs_without(monkeypatch):
    monkeypatch.setattr(trl_module, "found_at", lambda path: None)
    case = Case("logprobs", 3, "fp32", {"entropy": "value", "V": 9})
    assert nearest(load()["trl.selective_log_softmax"], case, "cpu").settings == {"V": 9}


@pytest.mark.parametrize(
    ("settings", "either"),
    [  # what is refused together: one of the two goes
        ({"loss_type": "vespo", "steps_per_generation": 4}, 1),
        ({"loss_type": "dapo", "mode": "eval", "softcap": 5.0, "holes": True}, 2),
        # taken beside dapo alone, both or neither
        ({"loss_type": "dapo", "accumulation": 4, "steps_per_generation": 4, "softcap": 5.0}, 2),
    ],
)
def test_of_what_is_refused_together_as_much_stays_as_can(settings, either):
    (liger,) = select(["liger.FusedLinearGRPOLoss"])
    near = nearest(liger, Case("policy", 3, "fp32", settings), "cpu")
    assert sum(near.settings.get(name) == value for name, value in settings.items()) >= either
    assert refusal(liger, near, "cpu") is None


def test_a_dtype_that_is_refused_is_another_and_what_is_not_installed_gets_nothing():
    (cce,) = select(["cce.unfiltered"])  # its backward refuses float32
    near = nearest(cce, Case("logprobs", 3, "fp32", {"softcap": 5.0, "V": 33}), "cpu")
    assert near.dtype == "fp16" and near.settings == {"softcap": 5.0, "V": 33}
    (absent,) = select(["unsloth.distillation_chunked_jsd"])
    if absent.missing() is not None:
        assert nearest(absent, Case("divergence", 3, "fp32", MANY), "cpu") is None


def test_an_early_release_that_refuses_the_defaults_starts_from_another_base():
    """TRL 0.15 reads reference log-probs at any beta, and no old ones."""
    early = only("not in this version", lambda s: s.beta != 0.0 and s.old == "absent")
    trainer = dataclasses.replace(load()["trl.GRPOTrainer"], limits=(early,))
    near = nearest(trainer, Case("policy", 3, "fp32", {"softcap": 5.0}), "cpu")
    assert near.settings == {"old": "absent", "beta": 0.04, "softcap": 5.0}


TAKEN = {"temperature", "softcap", "rare", "head_dtype", "ids_dtype", "chunk_size"}
OTHERS = {"B", "T", "V", "H", "targets", "cotangent", "grad", "peak"}


def moved(s):
    default = loss_family("logprobs").settings
    return {name for name in default if getattr(s, name) != default[name].default}


def narrow(x):
    require(moved(x.settings) <= TAKEN | OTHERS, "tried although it says that it does not take it")
    return load()["trl.selective_log_softmax"].call(x)


LIMITS = (
    only("few parameters", lambda s: moved(s) <= TAKEN | OTHERS),
    only("either a temperature or a softcap", lambda s: not {"temperature", "softcap"} <= moved(s)),
)
RECIPE = load()["trl.selective_log_softmax"].recipe
NARROW = Implementation("own.narrow", "logprobs", "candidate", narrow, RECIPE, limits=LIMITS)


@pytest.fixture
def session(tmp_path, monkeypatch):
    """A run of so many draws: `session(implementations, draws, **profile)`, and the rows that it judged."""

    def begun(chosen, draws, **fields):
        monkeypatch.setattr(shard_module, "cases_drawn", lambda family, profile: draws)
        rows: list = []
        profile = dataclasses.replace(PROFILES["pr"], **fields)
        note = lambda event: rows.append(event.row) if isinstance(event, Judged) else None  # noqa: E731
        return Session(chosen, "pr", profile, DTYPES, "cpu", Ledger((), tmp_path), note), rows

    return begun


def run_drawn(own, draws):
    for index, of in enumerate(streams(draws, "cpu")):
        own.run(Shard(family="logprobs", kind="drawn", seed=1, count=of, index=index, of=of))


def run_besides(own, *ids):
    assert own.run(Shard(family="logprobs", kind="besides", seed=1, count=1, implementations=ids)) == 1


def test_all_pairs_that_are_taken_are_met_and_nothing_else_is_tried(session):
    own, rows = session([NARROW], 60, least=0)
    run_drawn(own, 60)
    by_draws = len(rows)
    run_besides(own, "own.narrow")
    assert {row.verdict for row in rows} <= {"agree", "unsupported"}
    assert not any("tried" in row.message for row in rows)
    agreeing = [sorted({*r.settings} & TAKEN) for r in rows if r.verdict == "agree"]
    met = {pair for names in agreeing for pair in itertools.combinations(names, 2)}
    apart = {("rare", "softcap"), ("rare", "temperature"), ("softcap", "temperature")}
    assert met == set(itertools.combinations(sorted(TAKEN), 2)) - apart
    assert 0 < len({row.case for row in rows[by_draws:]}) < 12


def test_a_draw_that_no_candidate_takes_was_not_given_to_the_reference(session):
    """On TRL 0.22 a run of the reference beside candidates that the release lacks compared nothing."""
    absent = dataclasses.replace(NARROW, limits=(only("not in this release", lambda s: False),))
    both = [load()["trl.selective_log_softmax"], absent]
    own, rows = session(both, 20, least=5)
    run_drawn(own, 20)
    assert not rows
    run_besides(own, both[0].id)
    drawn = {case.id for _, drawn in own.streams.values() for case in drawn}
    assert len(drawn & {row.case for row in rows}) >= 5


def test_a_small_run_moves_every_setting_of_a_users_function_once(session):
    """A quick run drew no smoothing: a loss that smooths over V - 1 was green."""

    def loss(hidden, weight, ids, smoothing=0.0, z_loss=0.0, softcap=None, temperature=1.0, logit_scale=1.0): ...

    family = loss_family("logprobs")
    drawn, given = drawn_of(family, 160), drawn_of(family, 10)
    own = user.from_function(loss, "own.py:loss", [family])
    new, *_ = besides(own, drawn, lambda case: case in given, 2, "cpu", every_pair=False)
    moved = {name for case in (*given, *new) if refusal(own, case, "cpu") is None for name in case.settings}
    assert moved >= {"smoothing", "z_loss", "softcap", "temperature", "logit_scale"}
    assert len(new) < 40


def test_a_small_run_draws_more_for_a_users_function_alone(session):
    def loss(hidden, weight, ids, smoothing=0.0): ...

    family = loss_family("logprobs")
    chosen = [NARROW, user.from_function(loss, "own.py:loss", [family])]
    cases_of = []
    for these in (chosen[:1], chosen):
        own, rows = session(these, 40, least=8, least_own=8, cost=2)
        run_besides(own, *(i.id for i in these))
        cases_of.append({row.case for row in rows if row.implementation == NARROW.id})
        moved = {name for row in rows if row.implementation == "own.py:loss" for name in row.settings}
    assert cases_of[0] == cases_of[1] and "smoothing" in moved


@pytest.fixture
def besides_of(session, monkeypatch):
    """The rows of what implementations get besides their draws, of which nobody is given any: at least 8 cases each, a user's
    function 12."""

    def judged(*chosen):
        monkeypatch.setattr(shard_module, "dealt", lambda profile, counts, own: [0 for _ in counts])
        own, rows = session(chosen, 40, least=8, least_own=12, cost=2)
        run_besides(own, *(i.id for i in chosen))
        return rows

    return judged


def test_what_is_refused_in_the_call_counts_as_no_case(besides_of):
    """A function that takes no odd vocabulary and does not say so before it is called."""

    def picky(x):
        require(x.settings.V % 2 == 0, "an even vocabulary only")
        return NARROW.call(x)

    rows = besides_of(dataclasses.replace(NARROW, call=picky))
    judged, declined = ({r.case for r in rows if r.judged is said} for said in (True, False))
    assert len(judged) == 8 and declined


def test_a_user_s_function_gets_more_than_the_least_and_is_called_repeatedly(besides_of, monkeypatch):
    """In profile pr a KTO loss takes six draws, and none of them was among those with repeated calls."""

    def evaluated(x):
        return {n: v if torch.is_grad_enabled() else 2 * v for n, v in NARROW.call(x).items()}

    asked, ids = [], ("my.py:own", "lib.own")
    monkeypatch.setattr(shard_module, "repeated", lambda own, *more: asked.append(own.id) or True)
    for id, gates, count in zip(ids, ({"protocol"}, set()), (12, 8), strict=True):
        rows = besides_of(dataclasses.replace(NARROW, id=id, call=evaluated))
        assert {r.gate for r in rows if r.failing} == gates
        assert len({r.case for r in rows if r.judged}) == count
    assert {*asked} == {ids[0]}


def test_a_case_besides_the_draws_is_judged_once_for_all_that_get_it(besides_of, monkeypatch):
    asked, original = [], Session._judged
    monkeypatch.setattr(
        Session, "_judged", lambda self, case, *more: asked.append(case.id) or original(self, case, *more)
    )
    both = [NARROW, dataclasses.replace(NARROW, id="own.other")]
    together = besides_of(*both)
    assert len(asked) == len({*asked}) == 8
    alone = [row for one in both for row in besides_of(one)]
    same = lambda rows: sorted((r.implementation, r.case, r.subject, r.verdict, r.headroom) for r in rows)  # noqa: E731
    assert len(asked) == 3 * 8 and same(together) == same(alone)


def test_an_implementation_gets_at_least_so_many_and_no_more_than_it_needs():
    drawn = drawn_of(loss_family("logprobs"), 120)
    every, *_ = besides(NARROW, drawn, lambda case: True, 30, "cpu")
    own = [case for case in drawn if refusal(NARROW, case, "cpu") is None]
    assert len(own) + len(every) == 30
    assert len(besides(NARROW, drawn, lambda case: True, len(own) + 3, "cpu", every_pair=False)[0]) == 3
    assert all(refusal(NARROW, near, "cpu") is None for near in every)
    assert not {near.id for near in every} & {case.id for case in own}


def test_a_users_function_that_is_written_for_a_number_gets_cases_with_it():
    def loss(hidden, weight, ids, teacher_hidden, teacher_weight, temperature=1.0): ...

    loss.fixed = {"beta": 1.0}
    family = loss_family("divergence")
    own = user.from_function(loss, "own.py:loss", [family])
    drawn = [*draws(cases(family, DTYPES, "pr"), "fixed", 60)]
    new, *_ = besides(own, drawn, lambda case: True, 40, "cpu")
    assert len(new) >= 30 and all(case.settings["beta"] == 1.0 for case in new)


LONG = [("fp32", {"B": 3, "T": 11}), *((dtype, {"T": 300, "softcap": 3.0}) for dtype in DTYPES)]
WIDE = [(dtype, {"T": 1, "V": 4097}) for dtype in ("fp32", "fp16")]


OWN_FUNCTION = {"id": "own.py:f"}


@pytest.mark.parametrize(
    ("who", "count", "few", "many"),
    [  # each decade of a number that decides the loss
        (
            {"id": "own.py:f", "limits": ()},
            5,
            [("fp32", {"temperature": 0.002})],
            [{"temperature": 0.2 + n / 100} for n in range(60)],
        ),
        # a last chunk of one token that was left out was in one of 76 cases, and that token was ignored
        (OWN_FUNCTION, 9, LONG, [{"T": 1 + n % 12} for n in range(80)]),
        # a loop over the blocks of a row that ended after one was right in all cases
        ({"interpreted": True}, 9, WIDE, [{"T": 1 + n % 4, "V": 4096 - n} for n in range(80)]),
    ],
    ids=["decades", "lengths", "blocks"],
)
def test_a_users_function_and_a_kernel_in_the_interpreter_get_what_shows_their_mistakes(who, count, few, many):
    base = {"B": 1, "V": 9}
    wanted = [Case("logprobs", 1, dtype, base | settings) for dtype, settings in few]
    others = [Case("logprobs", n, "fp32", base | settings) for n, settings in enumerate(many)]
    for fields in (who, {"limits": who.get("limits", NARROW.limits)}):
        own = dataclasses.replace(NARROW, **fields)
        found, *_ = besides(own, [*others, *wanted], lambda case: False, count, "cpu")
        assert ({case.id for case in wanted} <= {case.id for case in found}) is (fields is who)


@pytest.mark.parametrize("name", ["logprobs", "policy", "preference", "divergence"])
def test_whether_a_users_function_takes_a_case_is_known_before_the_case_is_built(name):
    """A search asks fifty thousand times: with each case built in full, an hour for a policy loss of few parameters."""
    family = loss_family(name)
    by_value = {"entropy_quantile", "sampler"}
    drawn = [case for case in drawn_of(family, 120) if not by_value & case.settings.keys()]
    every = sorted(set[str]().union(*(family.needed(family.build(case)) for case in drawn)))
    takes = frozenset(every[::2]) | family.needed(family.build(drawn[0]))
    own = Implementation("a.py:f", name, "candidate", lambda x: {}, parameters=takes)
    wanted, built = [own.lacks(family, family.build(case)) or None for case in drawn], []
    counting = dataclasses.replace(family, build=lambda case: built.append(case) or family.build(case))
    for _ in range(2):
        found = [capabilities._lacks(own, counting, case, family.full_settings(case)) for case in drawn]
        assert [bool(one) for one in found] == [bool(one) for one in wanted]
        assert all(one.settings.keys().isdisjoint(family.shapes) for one in built)
    assert None in wanted and any(wanted) and len(built) == len({case.id for case in built})


def test_a_covering_part_shows_all_and_the_most_first():
    found = list(covering(["ab", "abc", "d", "cd", "a"], set))
    assert found == ["abc", "d"] and list(covering(["ab", "cd"], set, {"a", "b"})) == ["cd"]
    assert list(covering(["abc", "ab", "c"], set, price=lambda case: 4.0 if "c" in case else 1.0)) == ["ab", "abc"]


def test_a_kernel_in_the_interpreter_gets_its_pairs_in_small_cases():
    settings = {"B": 1, "V": 9, "chunk_size": 2, "softcap": 3.0}
    small, large = (Case("logprobs", 1, "fp32", settings | {"T": t}) for t in (2, 200))
    for interpreted, first in ((True, small), (False, large)):
        one = dataclasses.replace(NARROW, interpreted=interpreted)
        found, *_ = besides(one, [large, small], lambda case: False, 1, "cpu")
        assert found == [first]


def test_of_costly_cases_few_fill_up_what_an_implementation_gets():
    large, small = ([Case("logprobs", n, "fp32", {"B": 1, "T": t, "V": 9}) for n in range(40)] for t in (1 << 16, 2))
    found, *_ = besides(NARROW, [*large, *small], lambda case: False, 30, "cpu")
    assert len(found) == 30 and 1 <= sum(case in large for case in found) < 10
    found, *_ = besides(NARROW, large, lambda case: False, 30, "cpu")  # there is nothing else
    assert len(found) == 30


def test_no_draw_holds_what_says_nothing():
    for name in loss_families():
        family = loss_family(name)
        for case in draws(cases(family, DTYPES, "pr"), f"settled/{name}", 150):
            full = vars(family.full_settings(case))
            assert family.canonical(case.dtype, dict(full)) == full


def test_every_implementation_of_a_run_has_a_shard_besides_its_draws():
    chosen = Options(families=("divergence",), implementations=("liger.fused_linear_kl_div",))
    kinds = [(s.kind, s.name) for s in planned(chosen, "cpu", 1).shards if s.kind == "besides"]
    assert ("besides", "divergence besides liger.fused_linear_kl_div") in kinds
    shards = planned(Options(families=("divergence",)), "cpu", 1).shards
    every = [s.implementations for s in shards if s.kind == "besides"]
    assert len({one.partition(".")[0] for ids in every for one in ids}) == len(every), "a shard for each library"


def test_a_users_function_gets_pairs_in_float32():
    """Where rounding hides nothing, also of settings that few functions take."""

    def loss(hidden, weight, ids, temperature=1.0, softcap=None, smoothing=0.0, z_loss=0.0): ...

    own = user.from_function(loss, "own.py:loss", [loss_family("logprobs")])
    drawn = drawn_of(loss_family("logprobs"), 400)
    new, *_ = besides(own, drawn, lambda case: True, 128, "cpu")
    met = [case.settings.keys() for case in [*drawn, *new] if case.dtype == "fp32" and not refusal(own, case, "cpu")]
    pairs = {*itertools.combinations(("temperature", "softcap", "smoothing", "z_loss"), 2)}
    assert [pair for pair in sorted(pairs) if not any({*pair} <= names for names in met)] == []


def test_advantages_of_zero_alone_stand_beside_a_kl():
    """A function that skips such a batch, and its KL with it, is seen by nothing else."""
    family = loss_family("policy")
    whole = [family.full_settings(case) for case in draws(cases(family, DTYPES, "pr"), "zeros", 900)]
    zeros = [s for s in whole if s.advantages == "zeros"]
    assert len(zeros) > 2 and all(s.beta > 0 for s in zeros)
