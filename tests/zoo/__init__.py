"""Models as people write them, for the audit to look into."""

import torch
from torch import nn
from torch.nn import functional as F


class LeNet(nn.Module):
    """Functional ReLU and pooling, convolutions without padding."""

    def __init__(self):
        super().__init__()
        self.c1, self.c2 = nn.Conv2d(3, 6, 5), nn.Conv2d(6, 16, 5)
        self.f1, self.f2, self.f3 = nn.Linear(16, 60), nn.Linear(60, 40), nn.Linear(40, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.c1(x)), 2)
        x = F.max_pool2d(F.relu(self.c2(x)), 2)
        x = torch.flatten(x, 1)
        return self.f3(F.relu(self.f2(F.relu(self.f1(x)))))


def alexnet():
    return nn.Sequential(
        nn.Conv2d(3, 24, 5, stride=2, padding=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(24, 32, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(512, 64),
        nn.ReLU(inplace=True),
        nn.Linear(64, 10),
    )


def vgg(norm=True):
    def block(i, o):
        return [nn.Conv2d(i, o, 3, padding=1), *([nn.BatchNorm2d(o)] if norm else []), nn.ReLU()]

    return nn.Sequential(
        *block(3, 16),
        *block(16, 16),
        nn.MaxPool2d(2),
        *block(16, 32),
        nn.Flatten(),
        nn.Linear(32 * 64, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


class Block(nn.Module):
    def __init__(self, i, o, stride=1, norm=True):
        super().__init__()
        self.c1 = nn.Conv2d(i, o, 3, stride, 1, bias=not norm)
        self.c2 = nn.Conv2d(o, o, 3, 1, 1, bias=not norm)
        self.n1, self.n2 = (nn.BatchNorm2d(o), nn.BatchNorm2d(o)) if norm else (nn.Identity(), nn.Identity())
        self.down = nn.Sequential(nn.Conv2d(i, o, 1, stride), nn.BatchNorm2d(o)) if stride != 1 or i != o else None

    def forward(self, x):
        out = F.relu(self.n1(self.c1(x)))
        out = self.n2(self.c2(out))
        out += x if self.down is None else self.down(x)
        return F.relu(out)


class ResNet(nn.Module):
    """A stem, two blocks, a hidden layer on the flattened map."""

    def __init__(self, norm=True, pooled=False):
        super().__init__()
        self.stem = nn.Conv2d(3, 12, 3, 1, 1)
        self.norm = nn.BatchNorm2d(12) if norm else nn.Identity()
        self.blocks = nn.Sequential(Block(12, 12, norm=norm), Block(12, 12, norm=norm))
        self.pool = nn.AdaptiveAvgPool2d(1) if pooled else nn.Identity()
        self.hidden = nn.Linear(12 if pooled else 12 * 256, 100)
        self.out = nn.Linear(100, 10)

    def forward(self, x):
        x = self.blocks(F.relu(self.norm(self.stem(x))))
        x = self.pool(x)
        x = x.view(x.size(0), -1)
        return self.out(F.relu(self.hidden(x)))


def mlp():
    return nn.Sequential(nn.Flatten(), nn.Linear(768, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))


class Mixer(nn.Module):
    """Patches by a strided convolution, mixing across tokens and channels."""

    def __init__(self, dim=64):
        super().__init__()
        self.embed = nn.Conv2d(3, dim, 4, 4)
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.t1, self.t2 = nn.Linear(16, 32), nn.Linear(32, 16)
        self.c1, self.c2 = nn.Linear(dim, 128), nn.Linear(128, dim)
        self.head = nn.Linear(dim, 10)

    def forward(self, x):
        x = self.embed(x).flatten(2).transpose(1, 2)
        x = x + self.t2(F.gelu(self.t1(self.n1(x).transpose(1, 2)))).transpose(1, 2)
        x = x + self.c2(F.gelu(self.c1(self.n2(x))))
        return self.head(x.mean(1))


class ViT(nn.Module):
    """Patch embedding, class token, positions, one encoder block, a hidden layer behind all tokens."""

    def __init__(self, dim=64):
        super().__init__()
        self.embed = nn.Conv2d(3, dim, 4, 4)
        self.token = nn.Parameter(torch.zeros(1, 1, dim))
        self.position = nn.Parameter(torch.randn(1, 17, dim) * 0.02)
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = nn.MultiheadAttention(dim, 4, batch_first=True)
        self.up, self.down = nn.Linear(dim, 128), nn.Linear(128, dim)
        self.head = nn.Linear(dim, 10)

    def forward(self, x):
        x = self.embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.position
        y = self.n1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        x = x + self.down(F.relu(self.up(self.n2(x))))
        return self.head(x[:, 0])


class TextCNN(nn.Module):
    def __init__(self, vocabulary=50, dim=16):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.conv = nn.Conv1d(dim, 32, 3, padding=1)
        self.f1, self.f2 = nn.Linear(32, 40), nn.Linear(40, 2)

    def forward(self, tokens):
        x = self.embedding(tokens).permute(0, 2, 1)
        x = F.relu(self.conv(x)).amax(2)
        return self.f2(F.relu(self.f1(x)))


class EmbeddingMLP(nn.Module):
    def __init__(self, vocabulary=50, dim=16, length=12):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.f1, self.f2 = nn.Linear(dim * length, 100), nn.Linear(100, 2)

    def forward(self, tokens):
        return self.f2(torch.relu(self.f1(self.embedding(tokens).reshape(len(tokens), -1))))


def tabular():
    return nn.Sequential(
        nn.BatchNorm1d(20),
        nn.Linear(20, 64),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(64, 32),
        nn.ReLU(),
        nn.Linear(32, 3),
    )


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(768, 100), nn.ReLU(), nn.Linear(100, 20))
        self.decoder = nn.Sequential(nn.Linear(20, 100), nn.ReLU(), nn.Linear(100, 768))

    def forward(self, x):
        return self.decoder(self.encoder(x.flatten(1))).view_as(x)


class LSTMHead(nn.Module):
    def __init__(self, vocabulary=50, dim=16):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.lstm = nn.LSTM(dim, 32, batch_first=True)
        self.f1, self.f2 = nn.Linear(32, 40), nn.Linear(40, 2)

    def forward(self, tokens):
        _, (hidden, _) = self.lstm(self.embedding(tokens))
        return self.f2(F.relu(self.f1(hidden[-1])))


class TwoInputs(nn.Module):
    """An image and a row of a table, joined."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.table = nn.Linear(5, 8)
        self.f1, self.f2 = nn.Linear(6 * 256 + 8, 100), nn.Linear(100, 4)

    def forward(self, image, row):
        joined = torch.cat([self.conv(image).flatten(1), torch.relu(self.table(row))], dim=1)
        return self.f2(F.relu(self.f1(joined)))


class FunctionalReLU(nn.Module):
    """Normalises inside the model, uses methods and functions only."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.4, 0.5, 0.6]).view(1, 3, 1, 1))
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.f1, self.f2 = nn.Linear(8 * 256, 100), nn.Linear(100, 4)

    def forward(self, x):
        x = (x - self.mean) / 0.25
        x = self.conv(x).relu()
        return self.f2(self.f1(x.reshape(x.shape[0], -1)).clamp(min=0))


class _Clip(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * (x > 0)


class CustomFunction(nn.Module):
    """A ReLU of one's own, and a forward pass that looks at its input."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.f1, self.f2 = nn.Linear(6 * 256, 100), nn.Linear(100, 4)

    def forward(self, x):
        if x.dim() != 4 or float(x.abs().sum()) < 0:
            raise ValueError("images are wanted")
        x = _Clip.apply(self.conv(x))
        return self.f2(F.relu(self.f1(x.flatten(1))))


class Tied(nn.Module):
    """The same layer twice."""

    def __init__(self):
        super().__init__()
        self.first, self.shared, self.out = nn.Linear(768, 64), nn.Linear(64, 64), nn.Linear(64, 4)

    def forward(self, x):
        x = F.relu(self.first(x.flatten(1)))
        return self.out(F.relu(self.shared(F.relu(self.shared(x)))))


class Transformer(nn.Module):
    """Torch's own encoder layer, taken whole."""

    def __init__(self, vocabulary=50, dim=16):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.encoder = nn.TransformerEncoderLayer(dim, 2, 32, batch_first=True)
        self.head = nn.Linear(dim, 2)

    def forward(self, tokens):
        return self.head(self.encoder(self.embedding(tokens)).mean(1))


class Of(nn.Module):
    """Parts and a forward pass in one line each."""

    def __init__(self, run, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.run = run

    def forward(self, x, **named):
        return self.run(self, x, **named)


class Conv1D(nn.Module):
    """GPT-2's layer, its matrix the other way round."""

    def __init__(self, outputs, inputs):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs) * 0.1), nn.Parameter(torch.zeros(outputs))

    def forward(self, x):
        return torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight).reshape(*x.shape[:-1], -1)
