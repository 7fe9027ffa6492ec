"""From what a user types to a model: `package.module:callable`, `path/to/file.py:callable`, `hf:NAME` or `timm:NAME`."""

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any

from torch import nn

from qbi.auditing.hubs import HUBS
from qbi.errors import BadValue, first_line


@contextmanager
def users_code(place: str) -> Iterator[None]:
    """Code of the user's: what it prints goes to standard error, and it cannot end the process as if all were well."""
    sys.stdout.flush()
    kept = None
    with suppress(OSError, ValueError):
        kept = os.dup(1)
        os.dup2(2, 1)  # other processes that it starts write to the file itself
    try:
        with redirect_stdout(sys.stderr):
            yield
    except SystemExit as ended:
        raise BadValue(f"{place} ends the process (exit code {ended.code!r}); take sys.exit out of it.") from None
    finally:
        if kept is not None:
            os.dup2(kept, 1)
            os.close(kept)


def load_callable(name: str, option: str) -> Any:
    """The named object of a module or of a Python file. It is the user's own code, and it is run."""
    place, _, attribute = name.rpartition(":")
    if not place or not attribute:
        raise BadValue(f"{option}: {name!r} names no callable; write package.module:callable or path.py:callable.")
    module = _module(place, option)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise BadValue(f"{option}: {place} has nothing called {attribute!r}.")
        found = getattr(found, part)
    return found


def load_plugin(name: str) -> None:
    """Run a module or Python file of the user's, which adds to the registries."""
    _module(name, "--plugin")


def _module(place: str, option: str) -> Any:
    try:
        with users_code(f"{option}: {place}"):
            return _from_file(Path(place), option) if place.endswith(".py") else _from_package(place)
    except ModuleNotFoundError as problem:
        raise BadValue(f"{option}: {place} is not found ({problem}). Is it installed, or in this folder?") from problem
    except BadValue:
        raise
    except Exception as problem:
        raise BadValue(f"{option}: {place} fails while it is loaded ({_said(problem)}).") from problem


def load_model(name: str, arguments: Mapping[str, Any], *, seed: int = 0) -> nn.Module:
    """A model: the callable's result, or the object itself where it is a model already. Its weights are drawn with the seed."""
    import torch

    torch.manual_seed(seed % 2**63)
    hub, _, known = name.partition(":")
    if hub in HUBS and known:
        with users_code(f"MODEL: {name}"):
            return _checked(HUBS[hub](known, arguments), name)
    found = load_callable(name, "MODEL")
    if isinstance(found, nn.Module):
        return _checked(found, name)
    if not callable(found):
        raise BadValue(f"MODEL: {name} is a {type(found).__name__}, not a model or something that makes one.")
    try:
        with users_code(f"MODEL: {name}"):
            made = found(**arguments)
    except BadValue:
        raise
    except Exception as problem:
        given = ", ".join(f"{k}={v!r}" for k, v in arguments.items()) or "no arguments"
        raise BadValue(
            f"MODEL: {name} fails with {given} ({_said(problem)}). Give arguments with --model-arg k=v."
        ) from problem
    if not isinstance(made, nn.Module):
        raise BadValue(f"MODEL: {name} returns a {type(made).__name__}, not an nn.Module.")
    return _checked(made, name)


def _checked(model: nn.Module, name: str) -> nn.Module:
    """Refuse a model whose parameters have no values yet."""
    from torch.nn.parameter import is_lazy

    for part, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise BadValue(f"MODEL: {part} of {name} has no shape yet; run it once on a sample before it is returned.")
        if parameter.is_meta:
            raise BadValue(
                f"MODEL: {part} of {name} is on the meta device and has no values; "
                "call model.to_empty(device='cpu') and load weights."
            )
    return model


def parse_arguments(pairs: list[str]) -> dict[str, Any]:
    """`k=v` with v as a number or a truth value where it reads as one, as text else."""
    out: dict[str, Any] = {}
    for pair in pairs:
        key, sign, value = pair.partition("=")
        if not sign or not key.isidentifier():
            raise BadValue(f"--model-arg: {pair!r} is not of the form name=value.")
        out[key] = _value(value)
    return out


def _value(text: str) -> Any:
    if text.lower() in ("true", "false", "none"):
        return {"true": True, "false": False, "none": None}[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _from_file(path: Path, option: str) -> Any:
    if not path.is_file():
        raise BadValue(f"{option}: {path} does not exist.")
    name = f"qbi_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    beside = str(path.resolve().parent)
    if beside not in sys.path:
        # What the file imports may lie beside it.
        sys.path.insert(0, beside)
    spec.loader.exec_module(module)
    return module


def _from_package(name: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    return importlib.import_module(name)


def _said(problem: Exception) -> str:
    return f"{type(problem).__name__}: {first_line(problem)}"
