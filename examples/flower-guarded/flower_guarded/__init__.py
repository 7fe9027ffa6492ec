"""A small federation with guarded clients."""
