"""What a client can do to its update before it leaves."""

from qbi.defences.aggp import AGGP, keep_share, prune_rows, prune_rows_in_place

__all__ = ["AGGP", "keep_share", "prune_rows", "prune_rows_in_place"]
