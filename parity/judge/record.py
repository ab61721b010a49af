"""The verdict on a function, and the failure as a test prints it."""

import dataclasses
from collections.abc import Mapping, Sequence

from parity.judge.gates import Judgement
from parity.judge.words import GATES


@dataclasses.dataclass(frozen=True)
class Parity:
    """The verdict on a function.

    Attributes:
        function: its name.
        quantities: output, or "grad_" and an input -> its judgement; `headroom` is error ÷ allowed at the tightest gate.
        kind: "precision" where the function's own code agrees in float64, or, if it does not run so, the same inputs in
            float32 agree, or for float32 inputs tf32 products would; else "logic". None where all agree.
        explained_by: the recipe that allows least of some under which all agrees, as declared, tf32 products first; or None.
        in_float64: whether the function's own code agrees in float64; None where it does not run so, or that decides nothing.
        hints: quantity -> what the error looks like.
        protocol: what does not hold of the protocol of calls, a sentence each.
        recipe: the recipe it was judged by, in words.
        inputs: shapes and dtypes, in words.
        case: the id of a drawn case, or nothing.
    """

    function: str
    quantities: Mapping[str, Judgement]
    protocol: Sequence[str]
    recipe: str
    inputs: str
    kind: str | None = None
    explained_by: str | None = None
    in_float64: bool | None = None
    hints: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    case: str = ""

    def __str__(self) -> str:
        return self.message

    @property
    def agrees(self) -> bool:
        """Whether every quantity agrees and the protocol holds."""
        return not self.wrong and not self.protocol

    @property
    def wrong(self) -> dict[str, Judgement]:
        """The quantities that disagree, the farthest first."""
        found = {n: j for n, j in self.quantities.items() if not j.agrees}
        return dict(sorted(found.items(), key=lambda item: -item[1].headroom))

    @property
    def failing(self) -> set[str]:
        """The quantities that disagree, and the parts of the protocol that do not hold."""
        return {*self.wrong, *(line.partition(":")[0] for line in self.protocol)}

    @property
    def headroom(self) -> float:
        """The largest error ÷ allowed of all quantities; above 1 is a disagreement."""
        return max((j.headroom for j in self.quantities.values()), default=0.0)

    @property
    def message(self) -> str:
        """The failure as a test prints it."""
        lines = [f"{self.function} {'differs from' if self.wrong else 'agrees with'} its definition in float64"]
        lines[0] += ", and breaks the protocol of calls" if self.protocol else ""
        if self.kind:
            own = {
                None: "",
                True: "; the same code in float64 is right",
                False: "; the same code in float64 is wrong too",
            }
            right = f"; right for code that rounds so: {self.explained_by}" if self.explained_by else ""
            lines.append(f"  class    {self.kind}{own[self.in_float64]}{right}")
        lines += [f"  case     {self.case}"] if self.case else []
        lines += [f"  inputs   {self.inputs}", f"  recipe   {self.recipe}"]
        lines += [f"✗ protocol {line}" for line in self.protocol]
        shown = [g for g in GATES if any(g in j.gates for j in self.quantities.values())]
        width = max([len(n) for n in self.quantities] + [14]) + 2
        lines.append("  error ÷ allowed".ljust(width + 2) + "".join(g.rjust(10) for g in shown))
        for name, j in self.quantities.items():
            cells = "".join((f"{j.gates[g]:.3g}" if g in j.gates else "").rjust(10) for g in shown)
            lines.append(f"{' ' if j.agrees else '✗'} {name}".ljust(width + 2) + cells)
        for name, j in self.wrong.items():
            lines.append(
                f"  {name}: gate {j.gate}, {j.headroom:.3g} times the allowed error: {GATES[j.gate]}"
                + (f"; {j.message}" if j.message else "")
            )
            lines += [
                f"    [{', '.join(map(str, index))}]  got {value:.7g}, float64 {exact:.7g}, error {error:.3g}"
                for index, value, exact, error in j.worst[:3]
            ]
            lines += [f"    hint: {hint}" for hint in self.hints.get(name, ())]
        return "\n".join(lines)


class ParityError(AssertionError):
    """What a test shows; `parity` is the record."""

    def __init__(self, parity: Parity):
        super().__init__(parity.message)
        self.parity = parity
