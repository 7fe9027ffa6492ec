"""Adapters to other people's systems, each behind its own extra."""
