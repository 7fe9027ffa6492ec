"""What `docs/measure.py` measures."""
