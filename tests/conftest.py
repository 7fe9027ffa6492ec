"""Shapes in signatures are checked, but in `make test`, which is to be quick (QBI_QUICK); real data are used wherever they are found."""

import os
import sys
from itertools import islice
from pathlib import Path

import pytest
from jaxtyping import install_import_hook

# All but the command line, whose functions are filled in by another library, and kernels, which another compiler reads.
CHECKED = [
    f"qbi.{p.stem}"
    for p in (Path(__file__).parents[1] / "src/qbi").iterdir()
    if p.stem not in ("cli", "kernels", "__init__")
]
if not os.environ.get("QBI_QUICK"):
    install_import_hook(CHECKED, "typechecking.checked")

import torch  # noqa: E402

from qbi.cli import main  # noqa: E402
from qbi.data.cifar10 import load_cifar10  # noqa: E402
from qbi.data.decode import centre_crop, decode_all, is_image  # noqa: E402
from qbi.data.folder import IMAGENET_MEAN, IMAGENET_STD  # noqa: E402
from qbi.data.text import Corpus  # noqa: E402
from qbi.data.tree import files  # noqa: E402
from qbi.lab.wordpiece import wordpiece_tokens  # noqa: E402
from qbi.records import ImageData, TextData  # noqa: E402

DATA = Path(os.environ.get("QBI_DATA", Path(__file__).parents[2] / "shared" / "data"))


def real_data(name: str) -> Path:
    path = DATA / name
    if not path.exists():
        pytest.skip(f"real data not found: {path} (set QBI_DATA)")
    return path


@pytest.fixture
def qbi_here(monkeypatch, capsys):
    """The command in this process: exit code and everything it said. Starting a process takes seconds, this does not."""

    def run(*arguments) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["qbi", *map(str, arguments)])
        capsys.readouterr()
        try:
            main()
            code = 0
        except SystemExit as ended:
            code = int(ended.code or 0)
        said = capsys.readouterr()
        return code, said.out if "--json" in arguments and said.out else said.out + said.err

    return run


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
