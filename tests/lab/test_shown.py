"""The pictures of the site, in small: what is read without a guard and with one, and how they are laid out."""

import numpy as np
import torch
from PIL import Image

from qbi.attacks import Cascade
from qbi.carrier import flat
from qbi.data.images import unit_pixels
from qbi.data.photos import synthetic_photos
from qbi.lab.measurements import shown
from qbi.lab.tiles import save_tiles


def test_a_crafted_layer_reads_all_without_a_guard_and_nothing_with_one():
    photos = synthetic_photos(shown.SHOWN, shown.SIDE, seed=0)
    truth = flat(unit_pixels(photos, slice(None)))
    name, seen = shown._crafted(photos, Cascade, 1.0, None)
    assert name == Cascade.name
    assert shown._judged(seen, truth) == {"psnr": 120.0, "psnr>19": 1.0, "psnr>30": 1.0}
    guarded = shown._judged(shown._crafted(photos, Cascade, 1.0, 1152.0)[1], truth)
    assert guarded["psnr>19"] == 0
    assert guarded["psnr"] < 19


def test_tiles_stand_row_by_row(tmp_path):
    tiles = torch.arange(6).view(2, 3, 1, 1, 1).expand(2, 3, 3, 4, 4) / 255
    save_tiles(tmp_path / "grid.png", tiles, scale=2)
    pixels = np.asarray(Image.open(tmp_path / "grid.png"))
    assert pixels.shape == (16, 24, 3)
    assert (pixels[:8, 8:16] == 1).all()
    assert (pixels[8:, 16:] == 5).all()
