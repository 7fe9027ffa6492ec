"""Pictures of samples in a grid: the truth beside what was read back."""

import io
import math

from jaxtyping import Float
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

GAP = 4
TITLE = 30
SIDE = 96


def side_by_side(
    left: Float[Tensor, "n c h w"], right: Float[Tensor, "n c h w"], titles: tuple[str, str], *, side: int = SIDE
) -> bytes:
    """Two grids in one PNG; each image at least `side` pixels high, enlarged without smoothing."""
    panels = [_panel(images, title, side) for images, title in zip((left, right), titles, strict=True)]
    width = sum(panel.width for panel in panels) + 4 * GAP
    canvas = Image.new("RGB", (width, max(panel.height for panel in panels)), "white")
    canvas.paste(panels[0], (0, 0))
    canvas.paste(panels[1], (panels[0].width + 4 * GAP, 0))
    return to_png(canvas)


def grid(images: Float[Tensor, "n c h w"], title: str) -> bytes:
    """One grid as a PNG."""
    return to_png(_panel(images, title))


def to_png(image: Image.Image) -> bytes:
    """The bytes of a file."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def stretched(images: Float[Tensor, "n c h w"]) -> Float[Tensor, "n c h w"]:
    """Each image between its own smallest and largest value: what can be shown of samples whose units are not known."""
    low, high = images.flatten(1).amin(1), images.flatten(1).amax(1)
    return (images - low.view(-1, 1, 1, 1)) / (high - low).clamp_min(1e-12).view(-1, 1, 1, 1)


def to_image(sample: Float[Tensor, "c h w"], side: int) -> Image.Image:
    """One sample in [0, 1] as a picture of at least `side` pixels."""
    channels = sample.shape[0]
    shown = sample if channels == 3 else sample[:1].expand(3, -1, -1)
    array = shown.clamp(0, 1).mul(255).round().byte().permute(1, 2, 0).cpu().numpy()
    image = Image.fromarray(array)
    factor = max(1, math.ceil(side / image.height))
    return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)


def _panel(images: Float[Tensor, "n c h w"], title: str, side: int = SIDE) -> Image.Image:
    pictures = [to_image(image, side) for image in images]
    columns = math.ceil(math.sqrt(len(pictures) * 1.25))
    rows = math.ceil(len(pictures) / columns)
    width, height = pictures[0].size
    panel = Image.new("RGB", (columns * (width + GAP) - GAP, TITLE + rows * (height + GAP)), "white")
    ImageDraw.Draw(panel).text((2, 4), title, fill="black", font=ImageFont.load_default(size=18))
    for index, picture in enumerate(pictures):
        row, column = divmod(index, columns)
        panel.paste(picture, (column * (width + GAP), TITLE + row * (height + GAP)))
    return panel
