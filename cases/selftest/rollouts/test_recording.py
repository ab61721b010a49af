"""Recordings: written and read back, refused in one line when damaged or foreign; engines without vLLM."""

import dataclasses
import json
import re
import shlex
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from parity import recording
from parity.case.drawing import cases, draws
from parity.cli.commands import main
from parity.errors import UsageError
from parity.families import policy_inputs
from parity.registry import loss_family
from parity.rollouts import contract, engine_models
from parity.rollouts.record import RecordingOptions, record
from parity.rollouts.server import Request
from parity.trainers.rig import models as rig


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    words = ["rollouts", "record", "--model", "tiny-gemma2", "--engine", "transformers", "--rows", "5"]
    words += ["--temperature", "0.7", "--top-p", "0.8", "--max-tokens", "6", "--out", str(folder)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["parity", *words])
        done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    (path,) = folder.glob("*.json")
    return path


def copied(made, folder):
    for file in made.parent.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder / made.name


def test_what_was_written_is_read(made):
    found = recording.load(made)
    assert found.facts["engine"].startswith("transformers ")
    assert found.sampler_logps.shape == (5, 6) == found.kept_mass.shape == found.raw_logps.shape
    truncated = found.trainer_logps - found.kept_mass.log()
    assert (truncated - found.sampler_logps)[found.mask].abs().max() < 1e-5
    assert (found.trainer_logps - found.sampler_logps)[found.mask].abs().max() > 0.05  # the mass that top-p cut


def test_the_command_makes_the_same_again(made, tmp_path):
    words = shlex.split(recording.load(made).facts["command"])[1:]
    done = CliRunner().invoke(main, [*words, "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    again = tmp_path / made.with_suffix(".safetensors").name
    assert again.read_bytes() == made.with_suffix(".safetensors").read_bytes()


def test_a_changed_byte_is_damage(made, tmp_path):
    path = copied(made, tmp_path)
    content = bytearray(path.with_suffix(".safetensors").read_bytes())
    content[-3] ^= 1
    path.with_suffix(".safetensors").write_bytes(content)
    with pytest.raises(UsageError, match="damaged"):
        recording.load(path)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"schema": 1}', '{"schema": 99}', "\x00\x01"])
def test_a_foreign_manifest_is_one_line(content, made, tmp_path):
    path = copied(made, tmp_path)
    path.write_text(content)
    done = CliRunner().invoke(main, ["rollouts", "judge", str(path)])
    assert done.exit_code == 2 and f"{path}: " in done.output and done.output.count("\n") == 1, done.output


def test_a_dtype_is_named_as_elsewhere(made, tmp_path):
    """It was a KeyError: 'float32'."""
    path = copied(made, tmp_path)
    path.write_text(path.read_text().replace('"dtype": "fp32"', '"dtype": "float32"'))
    with pytest.raises(UsageError, match="dtype 'float32' is unknown, choose from fp64, fp32, fp16, bf16"):
        recording.load(path)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda t: t.pop("completion_ids"), "no completion_ids"),
        (lambda t: t.update(weights=torch.zeros(2)), "weights unknown"),
        (lambda t: t.update(sampler_logps=t["sampler_logps"].double()), "float64"),
        (lambda t: t.update(sampler_logps=t["sampler_logps"][:, :2].clone()), "shape"),
        (lambda t: t.update(completion_lengths=t["completion_lengths"] + 99), "do not fit"),
        (
            lambda t: t.update(completion_ids=torch.zeros((), dtype=torch.int32)),
            r"completion_ids is torch.int32 of shape \(\), not torch.int32 of \(rows, tokens\)",
        ),
        (lambda t: t.update({name: value[:0] for name, value in t.items()}), "no tokens"),
        (lambda t: t.update(completion_lengths=t["completion_lengths"] * 0), "no tokens"),
    ],
)
def test_foreign_tensors_are_one_line(change, told, made, tmp_path):
    found = recording.load(made)
    tensors = found.tensors()
    change(tensors)
    path = recording.save(SimpleNamespace(name="x", facts=found.facts, tensors=lambda: tensors), tmp_path)
    with pytest.raises(UsageError, match=told):
        recording.load(path.with_suffix(".safetensors"))


@pytest.mark.parametrize("name", ["temperature", "top_p"])
@pytest.mark.parametrize("value", [0, -1, "null", '"1"'])
def test_a_temperature_or_top_p_without_a_distribution_is_refused(name, value, made, tmp_path):
    """At a temperature of 0 every token was left out, and the recording agreed."""
    path = copied(made, tmp_path)
    path.write_text(re.sub(f'"{name}": [^,]*', f'"{name}": {value}', path.read_text()))
    with pytest.raises(UsageError, match=f"{name} .*: there is no distribution to judge"):
        recording.load(path)


def test_a_token_that_the_model_has_not_is_refused(made):
    found = recording.load(made)
    ids = found.completion_ids.clone()
    ids[0, 0] = 10_000_000
    with pytest.raises(UsageError, match="token 10000000 is none of the "):
        contract.held(dataclasses.replace(found, completion_ids=ids), None, None, "truncated")


def test_vllm_that_is_not_there_is_one_line(tmp_path):
    from parity.rollouts.vllm_engine import distribution

    if distribution() is not None:
        pytest.skip("vLLM is installed here")
    words = ["rollouts", "record", "--model", "tiny-llama", "--engine", "vllm", "--out", str(tmp_path)]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 2 and "make rollouts" in done.output


class Server(BaseHTTPRequestHandler):
    """The completions protocol over transformers' sampling: real answers, in one of the two ways to give token ids."""

    ids_as = "token_ids"

    def do_GET(self):
        self._answer({"data": [{"id": "tiny"}]} if self.path == "/v1/models" else {"version": "0"})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert (asked["min_p"], asked["repetition_penalty"]) == (0, 1)  # not the model's own
        sampling = (asked["temperature"], asked["top_p"], max(asked["top_k"], 0))
        found = self.server.sample(Request([asked["prompt"]], *sampling, asked["max_tokens"], asked["seed"]))
        tokens = found.completions[0]
        texts = [f"w{i}" if self.ids_as == "text" else f"token_id:{i}" for i in tokens]
        choice = {"logprobs": {"token_logprobs": found.logps[0], "tokens": texts}}
        choice |= {"token_ids": tokens} if self.ids_as == "token_ids" else {}
        self._answer({"choices": [{"text": "w3"} if self.ids_as == "nothing" else choice]})

    def _answer(self, content):
        body = json.dumps(content).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.mark.parametrize("ids_as", ["token_ids", "token_id:", "text", "nothing"])
def test_a_server_over_loopback(ids_as, made, tmp_path, monkeypatch):
    monkeypatch.setattr(Server, "ids_as", ids_as)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    server.sample = engine_models.opened(str(engine_models.folder_of("tiny-gemma2")), "fp32", 64)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        options = RecordingOptions(
            "tiny-gemma2", url, tmp_path, temperatures=(0.7,), top_ps=(0.8,), rows=3, max_tokens=4
        )
        refused = {"nothing": "no log-probs in the answer", "text": "gives tokens as text"}.get(ids_as)
        if refused:
            with pytest.raises(UsageError, match=refused):
                list(record(options))
            return
        (path,) = record(options)
    finally:
        server.shutdown()
        server.server_close()
    found, whole = recording.load(path), recording.load(made)
    assert found.facts["reported"] == "server"
    n = int(found.completion_lengths.min())
    # row i has seed i in both: the first tokens are the same
    assert torch.equal(found.completion_ids[:, :n], whole.completion_ids[:3, :n])


def test_no_server_is_one_line(tmp_path):
    with pytest.raises(UsageError, match="no server answers"):
        list(record(RecordingOptions("tiny-llama", "http://127.0.0.1:9", tmp_path, rows=1)))


def test_drawn_policy_cases_take_recordings():
    family = loss_family("policy")
    drawn = list(draws(cases(family, ("fp32", "bf16"), "nightly"), "recordings", 60))
    named = [c for c in drawn if c.settings.get("recording", "none") != "none"]
    assert 3 <= len(named) < 40
    inputs = family.build(named[0])
    assert inputs.importance_sampling_ratio is not None


def test_a_case_has_the_recorded_log_ratios():
    name = "gemma2-bf16-t1-p0.8"
    taken = recording.named(name)
    family = loss_family("policy")
    case = family.case(3, "fp32", {"ratio": "token", "recording": name, "B": 2, "T": 4})
    d = policy_inputs.recorded_log_ratios(case, family.full_settings(case)).flatten()
    recorded = (taken.trainer_logps.double() - taken.sampler_logps.double())[taken.mask]
    at = (recorded == d[0]).nonzero()[:, 0]
    assert any((recorded[i : i + 8] == d).all() for i in at)
    ratio = family.build(case).importance_sampling_ratio
    assert (ratio.flatten().double() - d.exp()).abs().max() < 1e-6


HEAD = 32
"""Size of an attention head; vLLM's attention on a CPU has 32, 64, 80, 96, 112 and 128."""


@pytest.mark.parametrize("name", engine_models.TINY)
def test_the_shipped_models_are_made_again_up_to_the_scale_of_the_head(name, tmp_path):
    """Those of the trainer checks, twice as wide. The scale is measured by a forward pass, whose last bits change with the
    version of transformers, and a recording is of one set of weights: so they are shipped."""
    config = rig.config(name)
    config.hidden_size = HEAD * config.num_attention_heads
    if getattr(config, "head_dim", None) is not None:
        config.head_dim = HEAD
    if hasattr(config, "query_pre_attn_scalar"):
        config.query_pre_attn_scalar = HEAD
    rig.write(config, tmp_path)
    shipped = engine_models.loaded(engine_models.folder_of(f"tiny-{name}"), torch.float32).state_dict()
    for key, value in engine_models.loaded(tmp_path, torch.float32).state_dict().items():
        assert torch.allclose(value, shipped[key], rtol=1e-3, atol=1e-3), key
