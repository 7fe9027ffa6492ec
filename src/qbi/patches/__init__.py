"""Vision transformers: patches from the patch embedding's gradient, and where each stands from the position embedding's."""

from qbi.patches.embedding import PatchEmbedding, find_embedding
from qbi.patches.fishing import one_class_speaks
from qbi.patches.reading import ReadPatches, read_patches, stands_alone

__all__ = ["PatchEmbedding", "ReadPatches", "find_embedding", "one_class_speaks", "read_patches", "stands_alone"]
