"""File and line of the code that a finding is about, in the installed release."""

import importlib
import inspect
from pathlib import Path
from typing import Any


def located(name: str) -> str:
    """`package/module.py:line`, relative to where the package is installed, of a dotted name; or why there is none."""
    try:
        found = resolved(name)
        found = function(found)
        file = inspect.getsourcefile(found)
        _, line = inspect.getsourcelines(found)
    except (ImportError, AttributeError, OSError, TypeError) as error:
        return f"not found in the installed release ({type(error).__name__})"
    if file is None:
        return "no source file in the installed release"
    return f"{relative(file, name.partition('.')[0])}:{line}"


def resolved(name: str) -> Any:
    """Import the longest prefix that is a module, then follow attributes."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[count:]:
            found = getattr(found, attribute)
        return found
    raise ModuleNotFoundError(name)


def function(found: Any) -> Any:
    """The Python function under decorators, Triton's JITFunction and its interpreted stand-in included."""
    found = inspect.unwrap(found)
    while not (inspect.isroutine(found) or inspect.isclass(found)) and hasattr(found, "fn"):
        found = found.fn
    return found


def relative(file: str, package: str) -> str:
    """The path from the package on: an issue names no folder of the machine it was written on."""
    parts = Path(file).parts
    return "/".join(parts[len(parts) - 1 - parts[::-1].index(package) :]) if package in parts else Path(file).name
