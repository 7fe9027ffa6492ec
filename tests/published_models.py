"""The models of `published.py`: names of packages, small sizes, random weights."""

from importlib import import_module
from typing import Any

import torch
from torch import nn

from published_data import CLASSES, COUNT, DRAWS, LABELS, LINKS, NODES, PICTURES, SLICES, Entry
from published_text import MODELS as LANGUAGE


def of(package: str, path: str, *args: Any, **named: Any) -> Any:
    """A class or function of a package, found and called when the model is made."""

    def make() -> nn.Module:
        place, _, name = path.rpartition(".")
        made: nn.Module = getattr(import_module(f"{package}.{place}" if place else package), name)(*args, **named)
        return made

    return make


class Graph(nn.Module):
    """Two graph layers of torch_geometric on samples that all have one graph, and a head on the mean of the nodes."""

    def __init__(self, kind: str, **named: Any) -> None:
        super().__init__()
        library = import_module("torch_geometric.nn")
        self.first = getattr(library, kind)(10, 16, **named)
        self.second = getattr(library, kind)(16, 16, **named)
        self.head = nn.Linear(16, CLASSES)
        self.register_buffer("edges", torch.tensor([[0, 1, 2, 3, 4, 5, 0, 2], [1, 2, 3, 4, 5, 0, 3, 5]]))

    def forward(self, x: Any) -> Any:
        x = self.first(x, self.edges).relu()
        return self.head(self.second(x, self.edges).relu().mean(1))


class Dense(Graph):
    """The same where every sample brings its own graph as a matrix."""

    def forward(self, x: Any, adjacency: Any) -> Any:  # type: ignore[override]
        x = self.first(x, adjacency).relu()
        return self.head(self.second(x, adjacency).relu().mean(1))


def mobile() -> nn.Module:
    v3 = import_module("torchvision.models.mobilenetv3")
    blocks = [
        v3.InvertedResidualConfig(8, 3, 16, 8, True, "RE", 2, 1, 1),
        v3.InvertedResidualConfig(8, 3, 24, 16, True, "HS", 2, 1, 1),
    ]
    made: nn.Module = v3.MobileNetV3(blocks, 32, CLASSES)
    return made


def residual() -> nn.Module:
    timm = import_module("timm.models.resnet")
    made: nn.Module = timm.ResNet(
        timm.BasicBlock, (1, 1, 1, 1), num_classes=CLASSES, channels=(8, 8, 16, 16), stem_width=8
    )
    return made


def regular() -> nn.Module:
    timm = import_module("timm.models.regnet")
    made: nn.Module = timm.RegNet(timm.RegNetCfg(depth=5, w0=8, wa=10.0, wm=2.0, group_size=8), num_classes=CLASSES)
    return made


def shuffled() -> nn.Module:
    kind = import_module("torchvision.models.shufflenetv2").ShuffleNetV2
    made: nn.Module = kind([2, 2, 2], [8, 16, 24, 32, 48], num_classes=CLASSES)
    return made


def efficient() -> nn.Module:
    library = import_module("torchvision.models.efficientnet")
    blocks = [library.MBConvConfig(1, 3, 1, 8, 8, 1), library.MBConvConfig(4, 3, 2, 8, 16, 1)]
    made: nn.Module = library.EfficientNet(blocks, 0.0, 0.0, CLASSES, last_channel=32)
    return made


def inception() -> nn.Module:
    """GoogLeNet with its auxiliary outputs; of its body, which is large, the last block is trained."""
    made: nn.Module = import_module("torchvision.models").GoogLeNet(CLASSES, True, init_weights=False)
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(name.startswith(("inception5b", "aux", "fc")))
    return made


VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "num_classes": CLASSES}
MODELS = {
    "ViT": Entry(
        "timm", of("timm", "models.vision_transformer.VisionTransformer", depth=2, num_heads=2, **VIT), PICTURES
    ),
    "MLP-Mixer": Entry("timm", of("timm", "models.mlp_mixer.MlpMixer", num_blocks=2, **VIT), PICTURES),
    "ConvNeXt": Entry(
        "timm",
        of("timm", "models.convnext.ConvNeXt", num_classes=CLASSES, depths=(1, 1, 1, 1), dims=(8, 8, 16, 16)),
        PICTURES,
    ),
    "Swin": Entry(
        "timm",
        of(
            "timm",
            "models.swin_transformer.SwinTransformer",
            img_size=32,
            patch_size=4,
            window_size=4,
            embed_dim=16,
            depths=(1, 1),
            num_heads=(2, 2),
            num_classes=CLASSES,
        ),
        PICTURES,
    ),
    "ResNet": Entry("timm", residual, PICTURES),
    "RegNet": Entry("timm", regular, PICTURES),
    "ConvMixer": Entry(
        "timm",
        of("timm", "models.convmixer.ConvMixer", 16, 2, kernel_size=3, patch_size=4, num_classes=CLASSES),
        PICTURES,
    ),
    "MobileNetV2": Entry(
        "torchvision",
        of("torchvision", "models.MobileNetV2", CLASSES, 0.25, [[1, 16, 1, 1], [4, 24, 1, 2]], dropout=0.0),
        PICTURES,
    ),
    "MobileNetV3": Entry("torchvision", mobile, PICTURES),
    "DenseNet": Entry("torchvision", of("torchvision", "models.DenseNet", 8, (2, 2), 8, num_classes=CLASSES), PICTURES),
    "ShuffleNetV2": Entry("torchvision", shuffled, PICTURES),
    "SqueezeNet": Entry("torchvision", of("torchvision", "models.SqueezeNet", "1_1", CLASSES, 0.0), PICTURES),
    "EfficientNet": Entry("torchvision", efficient, PICTURES),
    "GoogLeNet": Entry("torchvision", inception, PICTURES),
    "torchvision's ViT": Entry(
        "torchvision", of("torchvision", "models.VisionTransformer", 32, 8, 1, 2, 32, 64, num_classes=CLASSES), PICTURES
    ),
    "MONAI's Regressor": Entry(
        "monai",
        of("monai", "networks.nets.Regressor", (1, 16, 16), (1,), (4, 8), (2, 2)),
        (SLICES, torch.randn(COUNT, 1, generator=DRAWS)),
    ),
    "MONAI's Classifier": Entry(
        "monai", of("monai", "networks.nets.Classifier", (1, 16, 16), CLASSES, (4, 8), (2, 2)), (SLICES, LABELS)
    ),
    "UNet": Entry(
        "monai",
        of("monai", "networks.nets.UNet", 2, 1, 3, (4, 8), (2,), num_res_units=1),
        (SLICES, (SLICES[:, 0] > 0).long()),
    ),
    "SegResNet": Entry(
        "monai",
        of("monai", "networks.nets.SegResNet", 2, 8, 1, 3, blocks_down=(1, 1), blocks_up=(1,)),
        (SLICES, (SLICES[:, 0] > 0).long()),
    ),
    "GCN": Entry("torch_geometric", lambda: Graph("GCNConv"), (NODES, LABELS)),
    "GraphSAGE": Entry("torch_geometric", lambda: Graph("SAGEConv"), (NODES, LABELS)),
    "TAG": Entry("torch_geometric", lambda: Graph("TAGConv"), (NODES, LABELS)),
    "dense GCN": Entry("torch_geometric", lambda: Dense("DenseGCNConv"), (NODES, LINKS, LABELS)),
    **LANGUAGE,
}
