"""From an update back to samples: divide, mask, merge, undo what the layers before did."""

from qbi.extraction.difference import difference_rounding, weight_difference
from qbi.extraction.quotients import extract, read_rows
from qbi.extraction.tokens import nearest_tokens

__all__ = ["difference_rounding", "extract", "nearest_tokens", "read_rows", "weight_difference"]
