"""Shapes in signatures are checked in every test; real data are used wherever they are found."""

import os
from itertools import islice
from pathlib import Path

import pytest
from jaxtyping import install_import_hook

install_import_hook("qbi", "beartype.beartype")

import torch  # noqa: E402

from qbi.data.cifar10 import load_cifar10  # noqa: E402
from qbi.data.decode import centre_crop, decode_all, is_image  # noqa: E402
from qbi.data.folder import IMAGENET_MEAN, IMAGENET_STD  # noqa: E402
from qbi.data.text import Corpus  # noqa: E402
from qbi.data.tree import files  # noqa: E402
from qbi.data.wordpiece import wordpiece_tokens  # noqa: E402
from qbi.records import ImageData, TextData  # noqa: E402

DATA = Path(os.environ.get("QBI_DATA", Path(__file__).parents[2] / "shared" / "data"))


def real_data(name: str) -> Path:
    path = DATA / name
    if not path.exists():
        pytest.skip(f"real data not found: {path} (set QBI_DATA)")
    return path


@pytest.fixture(scope="session")
def cifar() -> ImageData:
    return load_cifar10(real_data("cifar-10-python-6k.tar.gz"))


@pytest.fixture(scope="session")
def imagenet() -> ImageData:
    """The first 240 images; the whole set is for the tables."""
    source = islice(files(real_data("imagenet-val-3k.tar"), is_image), 240)
    decoded = decode_all(source, centre_crop(224, 256))
    labels = torch.arange(len(decoded.names)) % 10
    return ImageData("ImageNet", decoded.pixels, labels, tuple("0123456789"), IMAGENET_MEAN, IMAGENET_STD)


@pytest.fixture(scope="session")
def imdb() -> TextData:
    """The first 1,200 reviews of the archive, tokenised as the paper does."""
    wanted = files(real_data("aclImdb.tar.xz"), lambda n: n.endswith(".txt") and "/train/" in n and "unsup" not in n)
    texts = tuple(content.decode() for _, content in islice(wanted, 1200))
    return wordpiece_tokens(Corpus("IMDB", texts, tuple(i % 2 for i in range(1200)), ("neg", "pos")))
