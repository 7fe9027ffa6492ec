"""How annotations are checked in tests: as type checkers read them, an int passes for a float."""

from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
