"""A real environment: trl 0.27.2 with the partners of its time, made, damaged, lost and made again."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from datetime import timedelta

import pytest

import parity
from parity.errors import UsageError
from parity.versions import client, environment, resolve
from parity.versions.client import EnvironmentUnusable
from parity.versions.environment import Environment
from parity.versions.releases import parse_all, release, releases

ASKED = "trl==0.27.2"
PROBES = dict(environment.PROBES)


@pytest.fixture(scope="module")
def cache():
    """A cache of its own on the filesystem of the usual one, so that uv can link; skips without an index."""
    folder = client.cache_root() / "selftest" / uuid.uuid4().hex[:8]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PARITY_CACHE", str(folder))
        # Importing a trainer for the first time takes 15 s: docs/environments.md lists what was imported.
        patch.setattr(environment, "PROBES", {"liger-kernel": PROBES["liger-kernel"], "no-such": "import no_such"})
        try:
            release("trl", "0.27.2")
        except EnvironmentUnusable as error:
            pytest.skip(f"environments need uv and an index: {error}")
        yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def made(cache):
    return Environment.of([ASKED])


def left_over(cache):
    return [path.name for path in (cache / "envs").glob(".*") if path.is_dir()]


def test_it_holds_the_version_and_partners_of_its_era(made):
    assert made.versions["trl"] == "0.27.2"
    assert made.versions["torch"] == resolve.installed("torch"), "the build that runs here"
    assert made.versions["transformers"].startswith("5.") and made.versions["liger-kernel"] == "0.7.0"
    assert made.imports == {"liger-kernel": None}
    for tool in ("hypothesis", "pytest"):
        assert made.versions[tool] == resolve.installed(tool)


def test_the_harness_runs_in_it_and_trl_comes_from_it(made):
    program = (
        "import json, sys, os, importlib.metadata as m, importlib.util as u, parity.versions.releases as s;"
        "import hypothesis, pytest, rich, click, jinja2, safetensors, numpy; trl = u.find_spec('trl').origin;"
        "print(json.dumps([sys.prefix, trl, m.version('trl'), s.__file__, os.environ.get('EXTRA')]))"
    )
    done = made.run(["python", "-c", program], capture=True, settings={"EXTRA": "1"})
    assert done.returncode == 0, done.stderr
    prefix, trl, version, spec, extra = json.loads(done.stdout.splitlines()[-1])
    assert prefix == str(made.root) and trl.startswith(prefix) and version == "0.27.2" and extra == "1"
    assert spec == resolve.__file__.replace("resolve", "releases"), "this very harness"


def test_asking_again_returns_it_and_makes_nothing(made, monkeypatch):
    monkeypatch.setattr(environment, "_build", lambda *_: pytest.fail("made again"))
    assert Environment.of([ASKED]) == made
    assert [one.name for one in environment.listing()] == [made.name]


def test_a_damaged_one_is_made_again(made, cache):
    told = environment.site_packages(made.root) / f"trl-{made.versions['trl']}.dist-info"
    for victim in (made.root / "bin" / "python", told):
        victim.unlink() if victim.is_symlink() else victim.rename(made.root / "aside")
        assert Environment.of([ASKED]) == made and victim.exists()
    assert left_over(cache) == []
    locked = resolve.lock(parse_all([ASKED]))
    assert environment._whole(made.root, locked) == made
    assert environment._whole(made.root, dataclasses.replace(locked, linked=("gone",))) is None
    (made.root / "parity-environment.json").write_text('{"lock":')
    assert environment.listing() == [] and Environment.of([ASKED]) == made


def test_a_lost_one_comes_back_without_a_network(made, monkeypatch):
    monkeypatch.setenv("UV_OFFLINE", "1")
    environment.prune(timedelta())
    assert not made.root.exists()
    start = time.perf_counter()
    again = Environment.of([ASKED])
    print(f"rebuilt offline in {time.perf_counter() - start:.2f} s")
    assert again == made
    files = [os.lstat(file) for file in again.root.rglob("*") if file.is_file()]
    assert sum(file.st_blocks * 512 for file in files if file.st_nlink == 1) < 200e6, "hard links, not copies"


def test_a_killed_build_leaves_nothing_that_looks_like_one(made, cache):
    environment.prune(timedelta())
    program = f"from parity.versions.environment import Environment; Environment.of([{ASKED!r}])"
    variables = {**os.environ, "PYTHONPATH": str(resolve.Path(parity.__file__).parents[1])}
    started = subprocess.Popen([sys.executable, "-c", program], env=variables)
    while not left_over(cache) and started.poll() is None:
        time.sleep(0.005)
    started.send_signal(signal.SIGKILL)
    started.wait()
    assert environment.listing() == [] and left_over(cache), "killed in the middle of it"
    assert Environment.of([ASKED]) == made
    assert left_over(cache) == []


def test_a_disk_that_fills_up_is_a_message_and_leaves_nothing(made, cache, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    environment.prune(timedelta())
    monkeypatch.setattr(environment, "save_json", full)
    with pytest.raises(EnvironmentUnusable, match="No space left on device"):
        Environment.of([ASKED])
    assert environment.listing() == [] and left_over(cache) == []
    monkeypatch.undo()
    monkeypatch.setenv("PARITY_CACHE", str(cache))


@pytest.mark.parametrize(
    "specs, hold, says",
    [
        (["trl==0.27.99"], [], "there is no version of trl==0.27.99"),
        (["trl-x-none==1.0"], [], "trl-x-none was not found in the package registry"),
        (["trl==1.16.0"], ["transformers==4.30.0"], "transformers"),
    ],
)
def test_what_cannot_be_resolved_is_the_resolvers_message_on_one_line(cache, specs, hold, says):
    with pytest.raises(EnvironmentUnusable) as refusal:
        Environment.of(specs, hold)
    assert says in str(refusal.value) and "\n" not in str(refusal.value)


def test_the_leading_package_sets_the_era_and_what_is_held_has_no_say(cache):
    asked = parse_all(["cut-cross-entropy==24.12.1", ASKED])
    locked = resolve.lock(asked, parse_all(["transformers==5.1.0"]))
    assert locked.before == "2026-02-17T18:07:04+00:00"
    pins = locked.pins
    assert (pins["cut-cross-entropy"], pins["transformers"], pins["liger-kernel"]) == ("24.12.1", "5.1.0", "0.7.0")


def test_asked_and_held_is_a_usage_error(cache):
    with pytest.raises(UsageError, match="trl is both asked for and held"):
        Environment.of(["trl==1.0.0"], ["trl==1.1.0"])


def test_no_network_is_a_message(cache, tmp_path, monkeypatch):
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    with pytest.raises(EnvironmentUnusable, match=r"Failed to fetch.*Connection refused"):
        Environment.of(["trl==0.26.0"])
    with pytest.raises(EnvironmentUnusable, match="Failed to fetch"):
        releases("trl", "0.26.0", "0.27.0")


def test_where_no_index_has_this_torch_the_running_one_is_shown(cache, monkeypatch):
    monkeypatch.setenv("UV_FIND_LINKS", "")
    monkeypatch.setattr(resolve, "saved", lambda *_: None)  # the kept lock is of an index with the wheel folder
    monkeypatch.setattr(resolve, "save_json", lambda *_: None)
    monkeypatch.setattr(environment, "PROBES", {"torch": "import torch; torch.ones(2).sum()"})
    if "+" not in resolve.installed("torch"):
        pytest.skip(f"torch {resolve.installed('torch')} is a build that the index has")
    shown = Environment.of([ASKED])
    assert shown.imports == {"torch": None}
    assert shown.versions["torch"] == resolve.installed("torch")
    assert (environment.site_packages(shown.root) / "torch").is_symlink()
    assert resolve.installed("mypy") is None or "mypy" not in shown.versions, "torch only, not what lies beside it"


def test_releases_come_with_their_dates_in_order(cache):
    found = releases("liger-kernel", "0.6.4", "0.8.0")
    assert [one.version for one in found] == ["0.6.4", "0.6.5", "0.7.0", "0.8.0"]
    assert str(found[0].date)[:10] == "2025-11-21"
