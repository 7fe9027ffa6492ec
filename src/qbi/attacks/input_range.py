"""The range of values that an attack's rows are written for."""

from enum import Enum

from torch import Tensor


class InputRange(Enum):
    """What values an attack's rows are written for."""

    STANDARD = "around 0 with spread 1"
    UNIT = "between 0 and 1"

    def placement(self, values: Tensor) -> tuple[float, float] | None:
        """The centre and the spread that bring these values into the domain; None where they lie in it already."""
        wide = values.double()
        if self is InputRange.UNIT:
            centre, spread = float(wide.min()), float(wide.max() - wide.min())
            fine = centre >= 0 and centre + spread <= 1.0001
        else:
            centre, spread = float(wide.mean()), float(wide.std())
            fine = abs(centre) < 0.25 and 0.7 < spread < 1.4
        return None if fine or spread == 0 else (centre, spread)
