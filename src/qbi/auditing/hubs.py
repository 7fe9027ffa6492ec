"""Models of other packages, by name: `hf:NAME` (transformers) and `timm:NAME`. Weights are read from safetensors alone.

Nothing is unpickled, and no code comes with a model: what is not in the installed package is refused.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from qbi.errors import BadValue, DataError, MissingExtra, first_line


def from_transformers(name: str, arguments: Mapping[str, Any]) -> nn.Module:
    """A model of the Hugging Face hub, or of a folder that `save_pretrained` wrote, as the class its configuration names."""
    try:
        import transformers
    except ImportError:
        raise MissingExtra("transformers", "models") from None
    given: dict[str, Any] = {**arguments, "trust_remote_code": False}
    try:
        config = transformers.AutoConfig.from_pretrained(name, **given)
        wanted = (config.architectures or ["none"])[0]
        kind = getattr(transformers, wanted, None)
        if kind is None or not issubclass(kind, transformers.PreTrainedModel):
            raise BadValue(
                f"MODEL: hf:{name} asks for the class {wanted}, which the installed transformers does not have."
            )
        made: nn.Module = kind.from_pretrained(name, config=config, use_safetensors=True, attn_implementation="eager")
    except BadValue:
        raise
    except Exception as problem:
        # Whatever the other package raises, what the user can mend is the name, the network or the files.
        raise BadValue(
            f"MODEL: hf:{name} cannot be loaded ({first_line(problem)}). "
            "Is the name right, is the hub in reach, and does it have model.safetensors? Pickled weights are not opened."
        ) from problem
    return made


def from_timm(name: str, arguments: Mapping[str, Any]) -> nn.Module:
    """A timm architecture with weights drawn by the seed, or a folder with its `config.json` and `model.safetensors`."""
    try:
        import timm
    except ImportError:
        raise MissingExtra("timm", "models") from None
    if arguments.get("pretrained"):
        raise BadValue(
            "MODEL: timm: models are made without a download; fetch the folder from the hub first "
            "(hf download timm/NAME --local-dir NAME), and give timm:./NAME."
        )
    folder, config = Path(name), {}
    if folder.is_dir():
        config = _config(folder)
    given = {k: config[k] for k in ("num_classes", "global_pool") if config.get(k) is not None}
    given |= {**(config.get("model_args") or {}), **arguments, "pretrained": False}
    try:
        made: nn.Module = timm.create_model(config.get("architecture", name), **given)
        if config:
            from safetensors.torch import load_file

            made.load_state_dict(load_file(folder / "model.safetensors"))
    except Exception as problem:
        raise BadValue(
            f"MODEL: timm:{name} cannot be made ({first_line(problem)}). Is it an architecture of timm, or a folder with weights that fit?"
        ) from problem
    return made


def _config(folder: Path) -> dict[str, Any]:
    """What a folder in timm's form says of its model."""
    for file in ("config.json", "model.safetensors"):
        if not (folder / file).is_file():
            raise DataError(
                f"MODEL: {folder} has no {file}; timm's save_for_hf(..., safe_serialization=True) writes both."
            )
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except ValueError as problem:
        raise DataError(f"MODEL: {folder / 'config.json'} is no JSON ({first_line(problem)}).") from problem
    if not isinstance(config, dict) or not isinstance(config.get("architecture"), str):
        raise DataError(f"MODEL: {folder / 'config.json'} names no architecture.")
    return config


HUBS: dict[str, Callable[[str, Mapping[str, Any]], nn.Module]] = {"hf": from_transformers, "timm": from_timm}
"""By what stands before the colon."""
