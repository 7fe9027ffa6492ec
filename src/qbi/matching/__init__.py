"""Gradient matching: images that are moved until their gradient is the one that was sent. The fallback for models that nothing else reads."""

from qbi.matching.descent import Effort, MatchedImages, match_images, seconds_needed
from qbi.matching.distance import GradientDistance

__all__ = ["Effort", "GradientDistance", "MatchedImages", "match_images", "seconds_needed"]
