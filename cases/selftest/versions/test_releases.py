"""The bisect around the search: naming partners, and what it says; without an index or an environment."""

from types import SimpleNamespace

import pytest

from parity.versions import bisect as shell
from parity.versions.bisect import Measurement
from parity.versions.client import EnvironmentUnusable
from parity.versions.releases import Release

VERSIONS = [f"1.{minor}.0" for minor in range(12)]


class World:
    """Releases 1.0.0 to 1.11.0 of trl; liger-kernel moves with every third of them, datasets with every release."""

    def __init__(self, monkeypatch):
        self.unusable, self.asked, self.checked = set(), [], 0
        monkeypatch.setattr(shell, "releases", self.releases)
        monkeypatch.setattr(shell, "Environment", SimpleNamespace(of=self.environment))

    def releases(self, package, low, high):
        return [Release(package, version, None) for version in VERSIONS if minor(low) <= minor(version) <= minor(high)]

    def environment(self, specs, hold=()):
        pins = dict(str(one).split("==") for one in (*specs, *hold))
        self.asked.append(pins)
        if pins["trl"] in self.unusable:
            raise EnvironmentUnusable(f"trl=={pins['trl']} does not import: ImportError: no")
        own = minor(pins["trl"])
        return SimpleNamespace(versions={"liger-kernel": f"0.{own // 3}", "datasets": f"4.{own}", **pins})

    def check(self, broken):
        """A check that disagrees where `broken(trl's minor, liger's minor)`."""

        def run(environment):
            self.checked += 1
            bad = broken(minor(environment.versions["trl"]), minor(environment.versions["liger-kernel"]))
            return Measurement("disagree" if bad else "agree", 40.0 if bad else 0.5)

        return run


@pytest.fixture
def world(monkeypatch):
    return World(monkeypatch)


def minor(version):
    return int(version.split(".")[1])


def search(world, broken, **options):
    told = []
    asked = {"good": "1.0.0", "bad": "1.11.0", "say": told.append, **options}
    asked |= {"about": "is-ratio", "reproduce": "parity replay is-ratio --with {high}"}
    report = shell.search("trl", check=world.check(broken), **asked)
    return report, told


def test_the_package_itself_is_named_when_its_partners_are_innocent(world):
    report, told = search(world, lambda trl, liger: trl >= 6)
    assert (report.found.low, report.found.high, report.cause) == ("1.5.0", "1.6.0", ("trl",))
    assert report.moved == {"trl": ("1.5.0", "1.6.0"), "liger-kernel": ("0.1", "0.2"), "datasets": ("4.5", "4.6")}
    assert world.asked[-1] == {"trl": "1.6.0", "liger-kernel": "0.1", "datasets": "4.5"}, "partners held"
    assert report.text.startswith("is-ratio broke in trl 1.6.0\n")
    assert report.text.endswith("reproduce: parity replay is-ratio --with trl==1.6.0")
    assert told[0] == "trl 1.0.0: measuring (5 steps left after it)"


def test_a_partner_that_moved_is_tried_alone_and_named(world):
    report, _ = search(world, lambda trl, liger: liger >= 2)
    assert (report.found.low, report.found.high, report.cause) == ("1.5.0", "1.6.0", ("liger-kernel",))
    assert report.text.startswith("is-ratio broke in trl 1.6.0, with liger-kernel 0.2\n")
    assert "alone: liger-kernel 0.1 -> 0.2 shows the change" in report.text
    assert "alone: trl 1.5.0 -> 1.6.0 does not show it" in report.text
    assert "alone: datasets 4.5 -> 4.6 does not show it" in report.text


def test_a_change_that_takes_two_packages_is_said_to(world):
    report, _ = search(world, lambda trl, liger: liger >= 2 and trl >= 6)
    assert report.cause == () and "it takes them together" in report.text


def test_what_is_held_is_held_everywhere_and_in_the_line_to_reproduce(world):
    report, _ = search(world, lambda trl, liger: trl >= 6, hold=["liger-kernel==0.1"])
    assert all(pins["liger-kernel"] == "0.1" for pins in world.asked)
    assert report.text.endswith("--hold liger-kernel==0.1")
    assert "liger-kernel" not in report.moved


def test_find_fixed(world):
    report, _ = search(world, lambda trl, liger: trl < 4, good="1.11.0", bad="1.0.0", find="fixed")
    assert (report.found.low, report.found.high) == ("1.3.0", "1.4.0")
    assert report.text.startswith("is-ratio became right in trl 1.4.0")


def test_an_environment_that_cannot_be_made_is_passed_over_and_said(world):
    world.unusable = {"1.5.0", "1.6.0"}
    report, _ = search(world, lambda trl, liger: trl >= 6)
    assert (report.found.low, report.found.high, report.found.between) == ("1.4.0", "1.7.0", ("1.5.0", "1.6.0"))
    assert "not judged: trl 1.5.0: unsupported: trl==1.5.0 does not import: ImportError: no" in report.text


def test_an_end_that_cannot_be_made_ends_the_search(world):
    world.unusable = {"1.0.0"}
    report, _ = search(world, lambda trl, liger: trl >= 6)
    assert report.found.outcome == "unjudged" and "does not import" in report.text and "\n" not in report.text


@pytest.mark.parametrize(
    "broken, outcome", [(lambda trl, liger: False, "alike"), (lambda trl, liger: trl < 6, "swapped")]
)
def test_ends_without_a_search_between_them(world, broken, outcome):
    report, _ = search(world, broken)
    assert report.found.outcome == outcome and world.checked == 2 and "\n" not in report.text
