"""Data sets: built-in ones that need no download, and loaders for the published layouts."""
