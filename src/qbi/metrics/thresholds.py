"""How well a sample must be read to count: the one place that defines the levels, their words and their order."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Threshold:
    """A mean squared error below which a candidate counts as the sample.

    `key` names it in JSON, `words` in tables and sentences. Exactly one of `mse` and `psnr` is set; a PSNR speaks of the
    range of the data it is taken on.

    >>> EXACT.largest_error(1.0)
    1e-10
    >>> round(RECOGNISABLE.largest_error(1.0), 5)
    0.01259
    """

    key: str
    words: str
    mse: float | None = None
    psnr: float | None = None

    def largest_error(self, data_range: float) -> float:
        """The mean squared error at the threshold, for data that span `data_range`."""
        if self.mse is not None:
            return self.mse
        assert self.psnr is not None
        return data_range**2 * float(10 ** (-self.psnr / 10))

    def __str__(self) -> str:
        return self.words


EXACT = Threshold("mse<1e-10", "exact", mse=1e-10)
"""What the authors call a perfect reconstruction (erratum 9)."""

FAITHFUL = Threshold("psnr>60", "at 60 dB", psnr=60.0)
"""No difference that an eye or an 8-bit file could hold; what float16 and weight differences leave."""

CLEAR = Threshold("psnr>30", "at 30 dB", psnr=30.0)
"""A good picture."""

RECOGNISABLE = Threshold("psnr>19", "recognisable, 19 dB", psnr=19.0)
"""A picture in which one sees what it is."""

THRESHOLDS = (EXACT, FAITHFUL, CLEAR, RECOGNISABLE)
"""All of them, the strictest first."""
