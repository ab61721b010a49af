"""Runs as files and objects tell them. A file is parsed, never executed: YAML by the safe loader, a script by `ast`."""

import ast
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from parity.errors import Unsupported, UsageError
from parity.tools.advice.settings import Run, Unknown
from parity.upstream import trl

KNOWN = ("GRPO", "RLOO", "DPO", "KTO", "SFT", "OnlineDPO", "GKD", "GOLD", "Distillation")
ALIASES = {"lora_modules_to_save": "modules_to_save", "activation_checkpointing": "gradient_checkpointing"}


def from_yaml(path: Path, trainer: str | None) -> Run:
    """What `trl grpo --config path` takes, or a config's `to_json_string`. Without `trainer`, those that know most of it."""
    import yaml

    try:
        given = json.loads(path.read_text()) if path.suffix == ".json" else yaml.safe_load(path.read_text())
    except (yaml.YAMLError, ValueError) as error:
        raise UsageError(f"{path}: not a readable {path.suffix} file: {error}") from None
    if not isinstance(given, dict):
        raise UsageError(f"{path}: expected a table of settings")
    args = {ALIASES.get(str(k), str(k)): v for k, v in given.items()}
    trainers = (trainer,) if trainer else tuple(_candidates(set(args)))
    if not trainers:
        raise UsageError(f"{path}: it sets nothing of a trainer of TRL; say which runs it (--trainer GRPOTrainer)")
    models = [_model(str(args[k])) for k in ("model_name_or_path", "model") if args.get(k)]
    uses = frozenset(k for k, v in args.items() if v is True)
    return Run(str(path), trainers, len(trainers) == 1, args, tuple(models), uses=uses)


def _candidates(names: set[str]) -> list[str]:
    """The trainers whose config class knows most of these names; none where no class knows one."""
    known = {}
    for name in KNOWN:
        try:
            known[f"{name}Trainer"] = len(names & set(trl.fields(trl.class_named(f"{name}Config"))))
        except Unsupported:
            continue
    return [name for name, count in known.items() if count and count == max(known.values())]


def _model(name: str) -> str | Unknown:
    """A model's name, with the architecture where it is a folder; a folder without a config tells nothing."""
    folder = Path(name)
    if not (folder.is_absolute() or name.startswith(".") or folder.is_dir()):
        return name
    try:
        return f"{name} {json.loads((folder / 'config.json').read_text()).get('model_type', '')}"
    except (OSError, ValueError):
        return Unknown(f"{name} has no readable config.json")


def from_script(path: Path, trainer: str | None) -> list[Run]:
    """One run for each trainer that the script constructs, or makes the arguments of."""
    try:
        tree = ast.parse(path.read_text(), str(path))
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"{path}: not a readable script: {error}") from None
    script = _Script(tree)
    names = [trainer] if trainer else sorted(script.trainers())
    models = tuple(_model(m) if isinstance(m, str) else m for m in script.models())
    shared = Run(str(path), models=models, imports=script.imports, uses=script.uses)
    if not names:
        raise UsageError(f"{path}: it makes no trainer; if another file does, name that (--trainer GRPOTrainer)")
    runs = []
    for name in names:
        args, opened = script.args(name.removesuffix("Trainer") + "Config")
        runs.append(dataclasses.replace(shared, trainers=(name,), args=args, open=opened))
    return runs


class _Script:
    """What a syntax tree tells of trainers, arguments and models."""

    def __init__(self, tree: ast.Module) -> None:
        nodes = list(ast.walk(tree))
        self.calls = [node for node in nodes if isinstance(node, ast.Call)]
        self.bases = {
            c.name: [b.id if isinstance(b, ast.Name) else getattr(b, "attr", "") for b in c.bases]
            for c in nodes
            if isinstance(c, ast.ClassDef)
        }
        self.renamed = {a.asname: a.name for n in nodes if isinstance(n, ast.ImportFrom) for a in n.names if a.asname}
        modules = [a.name for n in nodes if isinstance(n, ast.Import) for a in n.names]
        self.imports = frozenset(modules + [n.module for n in nodes if isinstance(n, ast.ImportFrom) and n.module])
        attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        keywords = {k.arg for call in self.calls for k in call.keywords if k.arg and _true(k.value)}
        self.uses = frozenset(attributes | keywords | {node.id for node in nodes if isinstance(node, ast.Name)})
        self.constants = _constants(nodes)
        self.assigned = {
            t.attr for n in nodes if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Attribute)
        }

    def called(self, call: ast.Call) -> str:
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        return self.renamed.get(name, name)

    def trainers(self) -> set[str]:
        """The trainer classes that are called, a class of the script by the one that it extends; else those of configs."""
        called = {self.called(call) for call in self.calls}
        found = {self.trainer(name) for name in called} - {""}
        return found or {f"{name}Trainer" for name in KNOWN if f"{name}Config" in called}

    def trainer(self, name: str, seen: frozenset[str] = frozenset()) -> str:
        """The trainer class that a name stands for, empty for none. A class may have the name of the one it extends."""
        name = self.renamed.get(name, name)
        if name in self.bases and name not in seen:
            return next(filter(None, (self.trainer(base, seen | {name}) for base in self.bases[name])), "")
        return name if name.endswith("Trainer") and name != "Trainer" else ""

    def args(self, config: str) -> tuple[dict[str, Any], str]:
        """The keywords of the config's calls and of PEFT's; and why others may be set, empty where none can be."""
        found: dict[str, Any] = {}
        opened = ""
        calls = [c for c in self.calls if self.called(c).endswith(("Config", "Arguments"))]
        exact = [c for c in calls if self.called(c) in (config, "LoraConfig", "BitsAndBytesConfig")]
        if not any(self.called(c) == config for c in calls):
            opened = f"the script does not call {config}"
            exact = calls
        for call in exact:
            for keyword in call.keywords:
                if keyword.arg is None:
                    opened = f"{self.called(call)} takes **{ast.unparse(keyword.value)}"
                else:
                    name = ALIASES.get(keyword.arg, keyword.arg)
                    found[name] = self.value(keyword.value, name)
        for name in self.assigned & set(found):
            found[name] = Unknown(f"{name} is assigned to later")
        return found, opened

    def models(self) -> Iterator[str | Unknown]:
        """What `from_pretrained` and a trainer's `model=` are given, as far as it is text."""
        for call in self.calls:
            given = [k.value for k in call.keywords if k.arg in ("model", "model_name_or_path", "model_name")]
            if self.called(call) == "from_pretrained":
                if "okenizer" in ast.unparse(call.func) or "rocessor" in ast.unparse(call.func):
                    continue
                yield from (self.text(node) for node in [*call.args[:1], *given])
            elif self.trainer(self.called(call)):
                found = [self.value(node, "model") for node in [*call.args[:1], *given]]
                yield from (value for value in found if isinstance(value, str))

    def text(self, node: ast.expr) -> str | Unknown:
        value = self.value(node, "model")
        return value if isinstance(value, str) else Unknown(f"{ast.unparse(node)} is not a literal")

    def value(self, node: ast.expr, name: str) -> Any:
        """A literal, or a name that is given one once; else unknown."""
        if isinstance(node, ast.Name) and node.id in self.constants:
            node = self.constants[node.id]
        try:
            return ast.literal_eval(node)
        except ValueError:
            return Unknown(f"{name} = {ast.unparse(node)[:60]} is not a literal")


def _true(node: ast.expr) -> bool:
    return not (isinstance(node, ast.Constant) and node.value in (False, None))


def _constants(nodes: list[ast.AST]) -> dict[str, ast.expr]:
    """Names that are assigned to once, with what they are given."""
    given: dict[str, list[ast.expr]] = {}
    for node in nodes:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    given.setdefault(target.id, []).append(node.value)
        elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.For | ast.NamedExpr) and isinstance(
            node.target, ast.Name
        ):
            given.setdefault(node.target.id, []).extend([ast.Name("?"), ast.Name("?")])
    return {name: values[0] for name, values in given.items() if len(values) == 1}


def from_trainer(trainer: Any) -> Run:
    """A constructed trainer; nothing of it is changed or run."""
    import torch

    model: Any = getattr(trainer, "model", None)
    inner: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = getattr(inner, "config", None)
    models = [str(getattr(config, name, "")) for name in ("model_type", "_name_or_path")] if config is not None else []
    head = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
    uses: set[str] = set()
    imports: set[str] = set()
    if isinstance(head, torch.nn.Module):
        uses |= {"register_forward_hook"} if head._forward_hooks or head._forward_pre_hooks else set()
        uses |= {"load_in_4bit"} if type(head).__name__ == "Linear4bit" else set()
        imports.add(type(head).__module__)
    kinds = [kind for kind in type(trainer).__mro__ if kind.__name__.endswith("Trainer") and kind.__name__ != "Trainer"]
    imports |= {kind.__module__ for kind in kinds}
    for name in ("liger_loss", "liger_grpo_loss", "liger_loss_fn", "dpo_loss_fn"):
        imports.add(type(getattr(trainer, name, None)).__module__)
    given = getattr(trainer, "args", None)
    args = {} if given is None else {ALIASES.get(k, k): v for k, v in vars(given).items()}
    peft = next(iter(getattr(model, "peft_config", {}).values()), None)
    args["modules_to_save"] = list(getattr(peft, "modules_to_save", None) or [])
    if any(getattr(m, "gradient_checkpointing", False) for m in (model.modules() if model is not None else ())):
        args["gradient_checkpointing"] = True
    name = type(trainer).__name__
    return Run(name, tuple(k.__name__ for k in kinds), True, args, tuple(models), frozenset(imports), frozenset(uses))
