"""Vision transformers: whole images from the patch embedding and the positions, and what must give nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from published import missing
from qbi.auditing import Client, audit
from qbi.auditing.document import to_document
from qbi.data.images import normalised
from qbi.data.photos import synthetic_photos
from qbi.errors import CannotMount, CannotRead
from qbi.federation import client_step
from qbi.metrics import EXACT, RECOGNISABLE
from qbi.patches import find_embedding, one_class_speaks, read_patches, stands_alone
from qbi.private.defence import PrivateStep
from qbi.private.goal import Budget
from qbi.randomness import generator

SIDE, PATCH, HARD = 16, 4, 1
SHAPE, PIXELS = (3, SIDE, SIDE), 3 * SIDE * SIDE
PHOTOS = synthetic_photos(80, SIDE, seed=2)
X, Y = normalised(PHOTOS, slice(None)), torch.arange(80) % 10
STD = torch.tensor(PHOTOS.std).view(1, 3, 1, 1)


class SmallViT(nn.Module):
    """Patches by a convolution, or by a linear layer on them; positions that are learned, looked up, or none."""

    def __init__(self, width=64, *, linear=False, positions="learned", normed=False):
        super().__init__()
        torch.manual_seed(0)
        self.linear = linear
        self.cut = nn.Linear(48, width) if linear else nn.Conv2d(3, width, PATCH, PATCH)
        self.first = nn.LayerNorm(48) if normed else nn.Identity()
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Embedding(17, width) if positions == "table" else None
        self.added = nn.Parameter(0.02 * torch.randn(1, 17, width)) if positions == "learned" else None
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        z = self.cut(self.first(F.unfold(x, PATCH, stride=PATCH).mT)) if self.linear else self.cut(x).flatten(2).mT
        z = torch.cat([self.token.expand(len(z), -1, -1), z], 1)
        z = z + (self.places(torch.arange(17)) if self.places is not None else 0 if self.added is None else self.added)
        return self.head(self.layers(z)[:, 0])


def error(image, index):
    """Mean squared error in pixels of [0, 1]."""
    return float(((image.view(SHAPE) - X[index]) * STD[0]).square().mean())


def read(model, gradients):
    return read_patches(find_embedding(model, SHAPE), gradients, PIXELS)


@pytest.mark.parametrize("model", [SmallViT(), SmallViT(linear=True), SmallViT(positions="table")], ids=["convolution", "linear", "table"])  # fmt: skip
def test_a_batch_of_one_is_read_whole_and_in_place(model):
    found = find_embedding(model, SHAPE)
    assert (found.layer, found.patches, found.width) == ("cut", 16, 64)
    assert found.rows.tolist() == list(range(1, 17))
    made = read(model, client_step(model, X[[HARD]], Y[[HARD]]).gradients)
    assert made.fits
    assert error(made.image, HARD) < 1e-10
    # Patches are counted as the client has them: each of its 16 stands where it belongs.
    own = F.unfold(X[[HARD]], PATCH, stride=PATCH)[0].T
    assert (made.patches - own).abs().max() < 1e-4


def test_two_images_are_not_one_and_that_is_told_without_the_truth():
    model = SmallViT()
    made = read(model, client_step(model, X[:2], Y[:2]).gradients)
    assert not made.fits
    assert made.rest > 0.01
    assert min(error(made.image, i) for i in (0, 1)) > RECOGNISABLE.largest_error(1.0)


def test_a_head_that_lets_one_class_speak_singles_an_image_out():
    model = SmallViT()
    sent = one_class_speaks(model, 3)
    made = read(model, client_step(sent, X[:8], Y[:8]).gradients)
    assert made.fits
    assert error(made.image, 3) < 1e-10
    # Two with that label speak at once, and neither is read.
    both = read(model, client_step(sent, X[[3, 13]], Y[[3, 13]]).gradients)
    assert not both.fits
    assert min(error(both.image, i) for i in (3, 13)) > RECOGNISABLE.largest_error(1.0)


class Gated(nn.Module):
    """Blocks that are gated at zero, as many begin: every image of a label sends the same, and a mean fits as an image does."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.cut = nn.Conv2d(3, 48, PATCH, PATCH)
        self.added = nn.Parameter(0.02 * torch.randn(1, 16, 48))
        self.inner, self.gate = nn.Linear(48, 48), nn.Parameter(torch.zeros(1))
        self.head = nn.Linear(16 * 48, 10)

    def forward(self, x):
        z = self.cut(x).flatten(2).mT + self.added
        return self.head((z + self.gate * self.inner(z).relu()).flatten(1))


@pytest.mark.parametrize(("batch", "alone"), [([3, 13], False), ([3, 4], True), ([3, 13, 23, 5], False)])
def test_a_mean_of_images_that_send_the_same_is_not_taken_for_one(batch, alone):
    """Found by a review: means of two and four images explained their updates to rounding."""
    model = Gated()
    embedding, sent = find_embedding(model, SHAPE), one_class_speaks(model, 3)
    gradients = client_step(sent, X[batch], Y[batch]).gradients
    found = read_patches(embedding, gradients, PIXELS)
    assert found.fits
    assert stands_alone(found, sent, embedding, gradients, X[batch], torch.tensor([3])) is alone
    assert (error(found.image, 3) < RECOGNISABLE.largest_error(1.0)) is alone


def shuffled(model):
    own = dict(client_step(model, X[[HARD]], Y[[HARD]]).gradients)
    order = torch.randperm(17, generator=torch.Generator().manual_seed(0))
    own["added"] = own["added"][:, order]
    return own


def of_another_model(_model):
    torch.manual_seed(5)
    other = SmallViT()
    with torch.no_grad():
        for p in other.parameters():
            p.add_(0.05 * torch.randn_like(p))
    wrong, right = (client_step(m, X[[HARD]], Y[[HARD]]).gradients for m in (other, SmallViT()))
    return dict(right) | {"added": wrong["added"]}


def private(bits):
    def step(model):
        return PrivateStep(Budget.for_goal(bits=bits)).update(model, X[[HARD]], Y[[HARD]], generator(0, "noise")).gradients  # fmt: skip

    return step


@pytest.mark.parametrize(
    "gradients",
    [shuffled, of_another_model, private(72.0), private(18.0), private(8.0)],
    ids=["positions shuffled", "another model", "72 bits", "18 bits", "8 bits"],
)
def test_what_does_not_belong_together_gives_nothing(gradients):
    model = SmallViT()
    made = read(model, gradients(model))
    assert not made.fits
    assert error(made.image, HARD) > RECOGNISABLE.largest_error(1.0)


@pytest.mark.parametrize(
    "model",
    [
        SmallViT(positions="none"),
        SmallViT(linear=True, normed=True),
        nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(392, 10)),
        nn.Sequential(nn.Flatten(), nn.Linear(PIXELS, 10)),
    ],
    ids=["no positions", "a norm before", "convolutions", "linear"],
)
def test_where_there_is_nothing_to_put_together(model):
    assert find_embedding(model, SHAPE) is None


def test_more_patches_than_the_embedding_is_wide_are_refused():
    model = SmallViT(width=12)
    with pytest.raises(CannotRead, match="16 patches an image and a width of 12"):
        read(model, client_step(model, X[[HARD]], Y[[HARD]]).gradients)
    model = SmallViT()
    gradients = dict(client_step(model, X[[HARD]], Y[[HARD]]).gradients)
    with pytest.raises(CannotRead, match="is not in the update"):
        read(model, {n: g for n, g in gradients.items() if n != "added"})
    with pytest.raises(CannotRead, match="nothing comes back"):
        read(model, {n: 0 * g for n, g in gradients.items()})
    with pytest.raises(CannotRead, match="NaN"):
        read(model, gradients | {"added": gradients["added"] * torch.nan})
    with pytest.raises(CannotMount, match="class 12"):
        one_class_speaks(model, 12)


def silent_head():
    model = SmallViT()
    nn.init.zeros_(model.head.weight)
    return model


@pytest.mark.parametrize("model", [SmallViT(), silent_head()], ids=["as initialised", "a head of zeros"])
@pytest.mark.long
def test_an_audit_puts_images_together(model):
    asked = {"client": Client(4), "attacks": ["passive"], "batches": 1, "defences": False}
    result = audit(model, PHOTOS, **asked)
    found = result.patches
    labels = PHOTOS.labels[torch.randperm(80, generator=generator(0, "batch", 0))[:4]]
    alone = int((labels.bincount() == 1).sum())
    assert alone > 0
    assert found.all_updates[EXACT] == alone / 4
    assert found.one_update[EXACT] == 1 / 4
    assert found.proven == alone
    assert found.honest[RECOGNISABLE] == 0
    assert found.first_alone[EXACT] == float(bool(model.head.weight.any()))
    assert found.truth.shape == found.seen.shape == (4, *SHAPE)
    assert int(((found.truth - found.seen).flatten(1).abs().amax(1) < 1e-3).sum()) == alone
    assert result.status == "leaks"
    assert "16 patches of layer cut, each in its place by added" in result.verdict
    schema = json.loads((Path(__file__).parents[2] / "docs/report.schema.json").read_text())
    jsonschema.validate(json.loads(json.dumps(to_document(result))), schema)
    assert audit(nn.Sequential(nn.Flatten(), nn.Linear(PIXELS, 10)), PHOTOS, **asked).patches is None


@pytest.mark.long
def test_a_narrow_embedding_is_said_not_to_be_read():
    result = audit(SmallViT(width=12), PHOTOS, client=Client(4), attacks=["passive"], batches=1, defences=False)
    assert "more unknowns than equations" in result.patches.reason
    assert not result.patches.says_more


@pytest.mark.long
def test_the_report_shows_an_image_for_each_sample(tmp_path, qbi_here):
    file = tmp_path / "net.py"
    file.write_text(f"import sys\nsys.path.append({str(Path(__file__).parent)!r})\nfrom test_patches import SmallViT\n")
    asked = ("--size", SIDE, "--batch-size", 3, "--batches", 1, "--attack", "passive", "--no-defences", "--no-match", "--no-decode")  # fmt: skip
    code, _ = qbi_here("audit", f"{file}:SmallViT", *asked, "--out", tmp_path, "--sarif")
    page = (tmp_path / "report.html").read_text()
    assert code == 0
    assert "<h2>Patches of images</h2>" in page
    assert "picture made of image 3" in page
    assert "patches put together reads 33.3 % of samples" in (tmp_path / "audit.sarif").read_text()


PUBLISHED = {
    "timm": "import timm; model = timm.create_model('vit_tiny_patch16_224', num_classes=10, img_size=64)",
    "torchvision": """
from torchvision.models import VisionTransformer
model = VisionTransformer(64, 16, 2, 3, 96, 128, num_classes=10)
torch.nn.init.normal_(model.heads.head.weight)  # zeros as it comes: nothing comes back before the first step
""",
    "transformers": """
import transformers
sizes = {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 128}
inner = transformers.ViTForImageClassification(transformers.ViTConfig(image_size=64, num_labels=10, **sizes))
class Logits(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = inner
    def forward(self, x):
        return self.inner(x).logits
model = Logits()
""",
}

READ_ALONE = """
from qbi.federation import client_step
from qbi.patches import find_embedding, read_patches
x = torch.rand(2, 3, 64, 64)
found = find_embedding(model, (3, 64, 64))
for batch in (x[:1], x):
    read = read_patches(found, client_step(model, batch, torch.tensor([3, 4][: len(batch)])).gradients, x[0].numel())
    print(int(read.fits), float((read.image - x[0].flatten()).abs().max()))
"""


@pytest.mark.long
@pytest.mark.parametrize("package", PUBLISHED)
def test_vision_transformers_of_published_packages(package):
    """Each in a process of its own, since what it puts on the path stays there."""
    if missing(package):
        pytest.skip(f"{package} is not installed; `make zoo` fetches it")
    start = "import torch, published; published.prepare(); torch.manual_seed(0)\n"
    tests = str(Path(__file__).parents[1])
    path = os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")])
    out = subprocess.run([sys.executable, "-c", start + PUBLISHED[package] + READ_ALONE], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)  # fmt: skip
    assert out.returncode == 0, out.stderr[-2000:]
    (one, near), (two, far) = (map(float, line.split()) for line in out.stdout.splitlines()[-2:])
    assert (one, two) == (1, 0)
    assert near < 1e-3 < 0.1 < far
