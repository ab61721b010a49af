"""JSON and TOML, read into typed structures: what is wrong with a file is one line of `UsageError`. Files are written whole."""

import hashlib
import os
import threading
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from parity.errors import UsageError

SHOWN = 80  # characters of a wrong value that a message repeats


def text_of(path: Path, what: str) -> str:
    """The text of a file, of `what`. Raises UsageError when there is no such file, or it is no text."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(f"{path}: no such {what} file") from None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path}: not a readable {what}: not UTF-8") from None


def toml_of(text: str, where: str, what: str) -> dict[str, Any]:
    """Plain values of a TOML text; `what` it should be is named in the UsageError."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise UsageError(f"{where}: nested too deeply") from None
    except ValueError as error:  # tomllib.TOMLDecodeError is one, and so is an integer of too many digits
        raise UsageError(f"{where}: not a readable {what}: {short(str(error))}") from None


def convert(kind: Any, data: Any, where: str) -> Any:
    """Plain values as a typed structure. Raises UsageError with `where` and what msgspec says of the field."""
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise UsageError(f"{where}: {short(str(error), 300)}") from None
    except RecursionError:
        raise UsageError(f"{where}: nested too deeply") from None


def decode(kind: Any, text: str | bytes, where: str) -> Any:
    """Strict JSON as a typed structure, or with `Any` as plain values. Raises UsageError naming `where`: malformed, not UTF-8,
    NaN, a number too large, too deeply nested, or what msgspec says of a field."""
    content = text.encode(errors="surrogatepass") if isinstance(text, str) else text
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.ValidationError as error:
        raise UsageError(f"{where}: {short(str(error), 300)}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{where}: not readable JSON: {short(str(error))}") from None
    except RecursionError:
        raise UsageError(f"{where}: nested too deeply") from None


def tensors_of(content: bytes, sha256: str, where: str) -> dict[str, Any]:
    """The tensors of a safetensors file. Raises UsageError naming `where`: another hash than was kept of it, or none."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise UsageError(f"{where}: damaged or another file: its SHA-256 begins {found[:12]}, expected {sha256[:12]}")
    try:
        return dict(load(content))
    except (SafetensorError, ValueError, KeyError) as error:
        raise UsageError(f"{where}: not a safetensors file: {error}") from None


def write(path: Path, content: str | bytes) -> None:
    """Write a file whole: a full disk, or a reader, sees the old one or the new one. Raises OSError naming `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
    left = memoryview(content.encode() if isinstance(content, str) else content)
    try:
        with open(draft, "wb", buffering=0) as file:  # unbuffered: a full disk shows here, not when it is closed
            while left:
                left = left[file.write(left) :]
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None


def save_json(path: Path, content: object) -> None:
    """Write plain values and structures as JSON, whole as `write` does."""
    write(path, msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n")


def saved(kind: Any, path: Path) -> Any:
    """What `save_json` wrote, as a typed structure; None where nothing is, or what is there cannot be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, ValueError, RecursionError, msgspec.MsgspecError):
        return None


def of_schema(data: Any, schema: int, where: str, name: str) -> None:
    """Refuses what is no JSON object of this schema, before anything else of it is read. Raises UsageError: "{where}:
    {name} is a JSON object, got …", "schema is mandatory", "schema … is not readable here"."""
    if not isinstance(data, dict):
        raise UsageError(f"{where}: {name} is a JSON object, got {type(data).__name__}")
    if "schema" not in data:
        raise UsageError(f'{where}: schema is mandatory (this parity writes "schema": {schema})')
    if data["schema"] != schema or isinstance(data["schema"], bool):
        raise UsageError(f"{where}: schema {short(repr(data['schema']))} is not readable here, expected {schema}")


def short(text: str, most: int = SHOWN) -> str:
    """One line of so many characters at most."""
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[: most - 1]}…"


def shown(value: Any) -> str:
    """A value as a message repeats it."""
    try:
        return short(repr(value))
    except ValueError:  # an integer of more digits than Python prints
        return "a number of thousands of digits"
