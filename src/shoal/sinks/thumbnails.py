"""Thumbnails of images, with limits, because images come from strangers. Needs Pillow."""

from __future__ import annotations

import io
import threading
from collections.abc import Sequence

from PIL import Image, UnidentifiedImageError

FORMATS = ("JPEG", "PNG", "GIF", "WEBP")
"""Only these decoders run. The others are old, rare on the web, and more often broken."""
_ORIENTATION = 0x0112
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""How to turn an image upright, by its orientation. Pillow's own function also writes the metadata again, which fails
if a tag has the wrong type."""
_QUALITY = 85
_one_at_a_time = threading.Lock()
"""Held while an image is decoded, so that a process has only one in memory: it takes up to 8 bytes per pixel."""


def make_thumbnails(body: bytes, sizes: Sequence[tuple[int, int]], max_pixels: int) -> list[bytes]:
    """A JPEG for each size, not larger than the image itself. ValueError if the image cannot be read or is too large.

    It blocks. Threads take turns."""
    with _one_at_a_time:
        try:
            with Image.open(io.BytesIO(body), formats=FORMATS) as image:
                width, height = image.size
                if width * height > max_pixels:  # before anything is decoded
                    raise ValueError(f"{width}x{height} pixels are too many; the limit is {max_pixels}")
                largest = max(max(size) for size in sizes)
                image.draft("RGB", (2 * largest, 2 * largest))  # a JPEG is decoded at a fraction of its size
                turn = _TURNS.get(image.getexif().get(_ORIENTATION, 1))
                flat = _on_white(_shrunk(image, largest))
                if turn is not None:
                    flat = flat.transpose(turn)
        except (UnidentifiedImageError, Image.DecompressionBombError, Image.DecompressionBombWarning) as exc:
            raise ValueError(f"not an image that can be read: {type(exc).__name__}") from exc
        except ValueError:
            raise
        except Exception as exc:  # decoders raise anything
            raise ValueError(f"a damaged image: {exc}") from exc
        return [_thumbnail(flat, size) for size in sizes]


def _shrunk(image: Image.Image, largest: int) -> Image.Image:
    """The image in the size of the largest thumbnail, so that only one copy is large."""
    if image.mode not in ("RGB", "RGBA", "L", "LA"):
        image = image.convert("RGBA" if "transparency" in image.info else "RGB")
    image.thumbnail((largest, largest), Image.Resampling.LANCZOS)
    return image


def _on_white(image: Image.Image) -> Image.Image:
    """The image without transparency, as JPEG needs it."""
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        layer = image.convert("RGBA")
        white = Image.new("RGB", layer.size, "white")
        white.paste(layer, mask=layer.getchannel("A"))
        return white
    return image.convert("RGB")


def _thumbnail(image: Image.Image, size: tuple[int, int]) -> bytes:
    copy = image.copy()
    copy.thumbnail(size, Image.Resampling.LANCZOS)
    out = io.BytesIO()
    copy.save(out, "JPEG", quality=_QUALITY)
    return out.getvalue()
