"""The laboratory's commands: one thin module each."""
