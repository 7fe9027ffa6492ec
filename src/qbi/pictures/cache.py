"""Decoders are learned once for the layers before a layer and the images they are learned on, and kept."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from qbi.files import write_atomically
from qbi.pictures.decoder import Decoder, learn_decoder
from qbi.pictures.prefix import Prefix, features_of


def folder() -> Path:
    """Where decoders are kept: the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return cache / "qbi" / "decoders"


def decoder_for(
    prefix: Prefix,
    images: Tensor,
    *,
    steps: int,
    width: int,
    stages: int,
    seed: int,
    progress: Callable[[float], None] | None = None,
) -> Decoder:
    """A kept decoder for these layers, images and settings, or a new one. What cannot be kept is learned again next time."""
    from safetensors.torch import load, save

    digest = hashlib.sha256(images.cpu().contiguous().numpy().tobytes()).hexdigest()[:12]
    path = folder() / f"{prefix.fingerprint(images[:2])}-{digest}-{steps}-{width}-{stages}-{seed}.safetensors"
    shape = (int(images.shape[1]), int(images.shape[2]), int(images.shape[3]))
    if path.exists():
        try:
            state = load(path.read_bytes())
            kept = Decoder(features_of(prefix, images[:1]).shape[1], shape, width, stages, len(state["directions"]))
            kept.load_state_dict(state)
            return kept.to(images.device).eval()
        except Exception:
            path.unlink(missing_ok=True)
    made = learn_decoder(prefix, images, steps=steps, width=width, stages=stages, seed=seed, progress=progress)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, save({n: v.cpu().contiguous() for n, v in made.state_dict().items()}))
    except OSError:
        pass
    return made
