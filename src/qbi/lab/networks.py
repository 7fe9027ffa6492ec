"""The networks that prices and times are measured on."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Quickstart(nn.Module):
    """The network of Flower's first tutorial, which is PyTorch's own: 62,006 weights, one pooling layer used twice."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.conv1, self.pool, self.conv2 = nn.Conv2d(3, 6, 5), nn.MaxPool2d(2, 2), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images of 32×32."""
        x = self.pool(F.relu(self.conv2(self.pool(F.relu(self.conv1(x))))))
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x.flatten(1))))))  # type: ignore[no-any-return]


class FedAvgNet(nn.Module):
    """Two convolutions and two linear layers, as in the paper that FedAvg comes from, for 32×32 images."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 32, 5, padding=2), nn.Conv2d(32, 64, 5, padding=2)
        self.fc1, self.fc2 = nn.Linear(4096, 512), nn.Linear(512, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        out: Tensor = self.fc2(F.relu(self.fc1(x.flatten(1))))
        return out


class LeNetZhu(nn.Module):
    """Three convolutions with sigmoids and a head, all weights uniform in ±0.5: the LeNet of Deep Leakage from Gradients (Zhu et al.)."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 12, 5, 2, 2), nn.Conv2d(12, 12, 5, 2, 2)
        self.conv3, self.head = nn.Conv2d(12, 12, 5, 1, 2), nn.Linear(768, classes)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -0.5, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images of 32×32."""
        for conv in (self.conv1, self.conv2, self.conv3):
            x = torch.sigmoid(conv(x))
        out: Tensor = self.head(x.flatten(1))
        return out


def two_layers() -> nn.Module:
    """3072–200–10."""
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 200), nn.ReLU(), nn.Linear(200, 10))


def with_convolutions() -> nn.Module:
    """Three convolutions before the same two layers: the small CNN of the example's federation."""
    body = [nn.Conv2d(3, 64, 3, padding=1), nn.Conv2d(64, 64, 3, padding=1), nn.Conv2d(64, 3, 3, padding=1)]
    return nn.Sequential(*body, *two_layers())  # type: ignore[misc]


class Block(nn.Module):
    """A residual block with GroupNorm."""

    def __init__(self, wide: int, high: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(wide, high, 3, stride, 1, bias=False), nn.GroupNorm(16, high)
        self.conv2, self.norm2 = nn.Conv2d(high, high, 3, 1, 1, bias=False), nn.GroupNorm(16, high)
        same = stride == 1 and wide == high
        short = [nn.Conv2d(wide, high, 1, stride, bias=False), nn.GroupNorm(16, high)]
        self.short = nn.Identity() if same else nn.Sequential(*short)

    def forward(self, x: Tensor) -> Tensor:
        """Two convolutions, and what went in."""
        out = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(out + self.short(x))


class NormedBlock(nn.Module):
    """Two convolutions behind norms, beside what goes in: what learned servers are built of."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.run = nn.Sequential(
            nn.GroupNorm(8, width),
            nn.SiLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.GroupNorm(8, width),
            nn.SiLU(),
            nn.Conv2d(width, width, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        out: Tensor = x + self.run(x)
        return out


def resnet18() -> nn.Module:
    """ResNet-18 for 32×32 images, with GroupNorm."""
    blocks = [
        Block(*sizes)
        for wide, high, stride in ((64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2))
        for sizes in ((wide, high, stride), (high, high, 1))
    ]
    stem = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.GroupNorm(16, 64), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


class Transformer(nn.Module):
    """Four encoder layers of width 256 over 128 tokens; attention in linear layers, which Opacus' ghost mode can follow."""

    def __init__(
        self, width: int = 256, heads: int = 4, layers: int = 4, words: int = 10_000, length: int = 128
    ) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(Encoder(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        """Classes of texts."""
        places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens).contiguous()
        x = self.words(tokens) + self.places(places)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x.mean(1))
        return out


class VisionTransformer(nn.Module):
    """Patches of 4×4 of images of 32×32, learned positions, encoder layers with the norm first, and a token that says the class."""

    def __init__(self, width: int = 192, heads: int = 3, layers: int = 6, classes: int = 10) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, width, 4, 4)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 65, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        patches = self.cut(x).flatten(2).mT
        given = torch.cat([self.token.expand(len(x), -1, -1), patches], 1) + self.positions
        out: Tensor = self.head(self.norm(self.layers(given))[:, 0])
        return out


class Encoder(nn.Module):
    """Attention and a feed-forward network, each with a residual and a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """One layer."""
        q, k, v = (m(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for m in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = self.norm1(x + self.out(mixed))
        out: Tensor = self.norm2(x + self.down(F.relu(self.up(x))))
        return out
