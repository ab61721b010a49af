"""One case through an implementation: it is called, judged and explained, and becomes a row for each quantity."""

import dataclasses
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from parity.case.case import Case
from parity.case.family import Family
from parity.case.inputs import context_of, product_dtype
from parity.compare import hint
from parity.compare.result_rows import empty_row, flaky, judged_row, logic_row
from parity.compare.stale_cache import stale
from parity.implementations.implementation import Implementation
from parity.judge.gates import Judgement
from parity.judging.assess import CaseOracle, classify, confirmed, followed_variant, judged
from parity.protocol import process_state, side_effects
from parity.protocol.call import execute
from parity.protocol.exceptions import Outcome
from parity.results.row import Row

INTERPRETER_BLOCKS = 400


def skip_reason(
    family: Family, implementation: Implementation, case: Case, settings: Any, device: str, rejected: bool = False
) -> str | None:
    """Why an implementation does not claim this case, or its library is known to have it `rejected`, before it is called."""
    missing = implementation.missing()
    if missing:
        return missing
    if case.dtype not in implementation.dtypes:
        return f"dtype {case.dtype} is not among {', '.join(sorted(implementation.dtypes))}"
    context = context_of(settings)
    if {"tf32": "plain", "autocast_fp16": "autocast"}.get(context, context) not in implementation.contexts:
        return f"context {context} is not supported"
    if declared := implementation.refuses(settings, case.dtype, device, rejected):
        return declared
    if implementation.parameters is None:  # else the call says which it needs
        others = {n: s.default for n, s in family.settings.items() if s.few and n not in implementation.takes}
        if moved := next((n for n, default in others.items() if getattr(settings, n) != default), ""):
            return f"no parameter {moved}"
    if device != "cpu" or ("triton" not in sys.modules and not implementation.interpreted):
        return None
    from parity.implementations import interpreter  # a user's function may be a kernel, too

    interpreter.completed()
    return interpreter_limit(family, case, settings) if implementation.interpreted else None


def interpreter_limit(family: Family, case: Case, settings: Any) -> str | None:
    """Why Triton's interpreter cannot judge a kernel on this case: probed, or too many blocks for its pace."""
    from parity.implementations import interpreter

    if product_dtype(case, settings) == "bf16" and interpreter.truncates_bfloat16():
        return "Triton's interpreter truncates to bfloat16 where hardware rounds"
    rows, length = family.sizes(settings)
    blocks = rows * (1 + length // 512)
    if blocks > INTERPRETER_BLOCKS or length > 4 * 4096:
        return f"{blocks} blocks are too many for Triton's interpreter (at most {INTERPRETER_BLOCKS}): run it on CUDA"
    return None


def rows_of(whole: CaseOracle, implementation: Implementation, thorough: bool) -> Iterator[Row]:
    """Rows of one implementation: of each quantity, of each relation, and of what the calls left changed."""
    oracle = whole.offered(implementation)
    case, settings, device = oracle.inputs.case, oracle.inputs.settings, oracle.inputs.device.type
    recipe = implementation.recipe_for(oracle.inputs)
    about = {"role": implementation.role, "recipe": recipe.describe(), "undecided": oracle.inputs.undecided}
    base = empty_row(oracle.family, case, implementation.id, device, **about)
    if reason := skip_reason(oracle.family, implementation, case, settings, device):
        yield replace(base, message=reason)
        return
    outcome = execute(implementation, oracle.inputs)
    leaks, unfit = list(outcome.leaks), process_state.broken()
    if leaks and not unfit:
        leaks = side_effects.left_again(implementation, oracle.inputs, leaks)
    if outcome.verdict != "ran":
        message = "; ".join(filter(None, [outcome.message, *unfit]))
        yield replace(base, verdict=outcome.verdict, message=message, blame=outcome.blame)
        return
    if unfit:  # nothing in this process can be believed, least of all the replicas
        yield logic_row(base, "protocol", False, "; ".join(leaks + unfit))
        return
    found = _judge(whole, implementation, outcome)
    why = _explained(found) if found.failing else {}
    for name, j in found.judged.items():
        row = judged_row(base, found.oracle, name, j, found.outcome)
        if name in why:
            looks = [row.message]
            if not why[name]["recipes"]:
                looks += hint.hints(found.oracle, name, found.outcome, j.place, found.implementation)
            row = replace(row, message="; ".join(filter(None, looks)), **why[name])
        yield row
    broken, moody = list[str](), False
    if thorough:
        broken, moody = _repeated_calls(found)
        leaks += broken
        related = side_effects.relations(oracle.family, found.implementation, found.oracle.inputs, found.outcome)
        leaks += [] if found.failing else stale(whole, found.implementation)  # its oracle knows no patch
        for name, (holds, message) in related.items():
            yield logic_row(base, f"relation: {name}", holds, message)
    leaks += process_state.broken()
    moody = moody and leaks == broken  # and nothing else is left behind
    base.unjudged = list(found.outcome.unknown)
    if moody:
        leaks.append("the same calls once more give something else: by chance, not by what is called")
    row = logic_row(base, "protocol", not leaks, "; ".join(dict.fromkeys(leaks)))
    yield replace(row, verdict="nondeterministic", cls=None) if moody else row


@dataclasses.dataclass(frozen=True)
class Found:
    """A call on a case, and what the judge says of each of its quantities."""

    oracle: CaseOracle
    implementation: Implementation
    outcome: Outcome
    judged: Mapping[str, Judgement]

    @property
    def failing(self) -> list[str]:
        return [name for name, j in self.judged.items() if not j.agrees]

    def again(self) -> dict[str, bool]:
        """Of the quantities of one more such call, whether they agree."""
        second = execute(self.implementation, self.oracle.inputs)
        if self.outcome.same_as(second):
            return dict.fromkeys(self.failing, False)
        found = confirmed(self.oracle, self.implementation, second) if second.verdict == "ran" else {}
        return {name: j.agrees for name, j in found.items()}


def _judge(whole: CaseOracle, implementation: Implementation, outcome: Outcome) -> Found:
    """The first call held against the definition; what a user's function returns is judged, declared or not."""
    oracle = whole.offered(implementation)
    returned = implementation.outputs | (oracle.family.optional & set(outcome.quantities))
    if implementation.is_function and returned != implementation.outputs:
        implementation = dataclasses.replace(implementation, outputs=implementation.outputs | outcome.differentiable)
        if whole.offered(implementation) is not oracle:
            oracle = whole.offered(implementation)
            outcome = execute(implementation, oracle.inputs)
        implementation = dataclasses.replace(implementation, outputs=returned)
    return Found(oracle, implementation, outcome, confirmed(oracle, implementation, outcome))


def _explained(found: Found) -> dict[str, dict[str, Any]]:
    """What explains each of the quantities that disagree: the fields of its row."""
    failing, about = found.failing, (found.oracle, found.implementation)
    variant = followed_variant(*about, found.outcome, failing)
    unsteady = flaky(failing, found.again)
    classes = classify(*about, failing)
    first = found.oracle.most is not None  # what is new is judged once more, and asked then
    if first and unsteady:  # but this call will not come again
        whole = confirmed(found.oracle.whole, found.implementation, found.outcome)
        unsteady = {name for name in unsteady if not whole[name].agrees}
    recipes = [] if first else hint.undeclared(*about, found.outcome, found.judged)
    return {
        name: {
            "verdict": "nondeterministic" if name in unsteady else "disagree",
            "cls": None if name in unsteady else classes[name],
            "variant": variant,
            "recipes": list(recipes),
        }
        for name in failing
    }


def _repeated_calls(found: Found) -> tuple[list[str], bool]:
    """What of the protocol does not hold, and whether that was a wrong result which the same calls do not give again."""
    wrong = False

    def agree(outcome: Outcome) -> bool:
        nonlocal wrong
        right = by(found.oracle, outcome) or (found.oracle.most is not None and by(found.oracle.whole, outcome))
        wrong |= not right
        return right

    def by(oracle: CaseOracle, outcome: Outcome) -> bool:
        given = judged(oracle, found.implementation, outcome, only=frozenset(outcome.quantities))
        return all(j.agrees for j in given.values())

    calls = side_effects.AdapterCalls(found.implementation, found.oracle.inputs, found.oracle.beside, agree)
    leaks = calls.broken(found.outcome.quantities)
    return leaks, wrong and bool(leaks) and {*leaks}.isdisjoint(calls.broken(found.outcome.quantities))
