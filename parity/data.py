"""Where the frozen cases and the ledger are: in the checkout, or in the installed wheel."""

from pathlib import Path

_PACKAGE = Path(__file__).parent
_CHECKOUT = _PACKAGE.parent / "cases"


def in_checkout() -> bool:
    """Whether this is a checkout, whose files may be changed."""
    return (_CHECKOUT / "ledger.toml").exists()


def cases_dir() -> Path:
    """The folder that holds ledger.toml, regressions/ and history/."""
    return _CHECKOUT if in_checkout() else _PACKAGE / "_cases"


def ledger_file() -> Path:
    """The ledger of known findings."""
    return cases_dir() / "ledger.toml"


def frozen_cases() -> list[Path]:
    """Every frozen case, by name."""
    return sorted((cases_dir() / "regressions").glob("*.json"))


def rollouts_dir() -> Path:
    """The folder of the shipped recordings of a sampler's rollouts."""
    checkout = _PACKAGE.parent / "fixtures" / "rollouts"
    return checkout if _CHECKOUT.exists() else _PACKAGE / "_cases" / "rollouts"
