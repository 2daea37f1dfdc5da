# SPDX-License-Identifier: Apache-2.0
"""Letters rendered by this code, for `exactqat train --data`: python glyphs.py glyphs.npz

26 classes in 16 fonts, rotated, shifted, faint and noisy. Matplotlib ships the fonts (DejaVu, STIX and Computer
Modern), so every machine has the same ones and nothing is downloaded. They are harder than the digits: a network needs
fine differences between E and F, O and Q or I and J, which rounding to few codes loses.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
FONTS = (
    "DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSansMono", "DejaVuSansMono-Bold", "DejaVuSerif",
    "DejaVuSerif-Bold", "DejaVuSerif-Italic", "STIXGeneral", "STIXGeneralBol", "STIXGeneralItalic", "cmr10", "cmb10",
    "cmss10", "cmtt10", "cmti10",
)  # fmt: skip
# How many of each letter in each font.
RENDERINGS = 6
SIZE = 16
# Rendered larger and averaged, so that a letter moves by fractions of a pixel.
OVERSAMPLING = 4
FONT_SIZE = 0.85  # of the image's height
DEGREES, PIXELS = 10.0, 1.0  # rotated and shifted by at most these, either way
FAINTEST = 0.5  # of full contrast
NOISE = 0.1  # standard deviation


def rendered(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Images and their letters, always the same for a seed and a version of Pillow.

    Returns:
        uint8 [n, height, width], white on black, and strings [n].
    """
    import matplotlib
    from PIL import Image, ImageDraw, ImageFont

    side = SIZE * OVERSAMPLING
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    fonts = [
        # Pillow's own layout: the other one is not in all of its builds.
        ImageFont.truetype(folder / f"{name}.ttf", round(FONT_SIZE * side), layout_engine=ImageFont.Layout.BASIC)
        for name in FONTS
    ]
    generator = np.random.default_rng(seed)
    images, labels = [], []
    for letter in LETTERS:
        for font in fonts * RENDERINGS:
            right, down = side / 2 + OVERSAMPLING * generator.uniform(-PIXELS, PIXELS, 2)
            large = Image.new("L", (side, side))
            ImageDraw.Draw(large).text((right, down), letter, fill=255, font=font, anchor="mm")
            turned = large.rotate(generator.uniform(-DEGREES, DEGREES), Image.Resampling.BILINEAR)
            images.append(np.asarray(turned.resize((SIZE, SIZE), Image.Resampling.BOX), np.float64) / 255)
            labels.append(letter)
    clean = np.stack(images)
    contrast = generator.uniform(FAINTEST, 1, (len(clean), 1, 1))
    noisy = clean * contrast + generator.normal(0, NOISE, clean.shape)
    return np.round(255 * np.clip(noisy, 0, 1)).astype(np.uint8), np.array(labels)


if __name__ == "__main__":
    images, letters = rendered()
    np.savez(sys.argv[1], x=images, y=letters)
