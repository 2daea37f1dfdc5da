# SPDX-License-Identifier: Apache-2.0
"""Data of every kind the job takes, and of the kinds it must refuse: said clearly, skipped by name, never guessed."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
Image = pytest.importorskip("PIL.Image")

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

import glyphs  # noqa: E402

from exactqat.application.job import data, images  # noqa: E402


def picture(value: int, size: tuple[int, int] = (8, 8), mode: str = "RGB") -> Any:
    """One color everywhere; value 0..255 of all bands."""
    bands = len(Image.new(mode, (1, 1)).getbands())
    return Image.new(mode, size, value if bands == 1 else (value,) * bands)


def folder(path: Path, classes: tuple[str, ...] = ("cat", "dog"), count: int = 5, **options: Any) -> Path:
    """`count` pictures for each class; the class decides the first half of the brightness, the number the rest."""
    for position, name in enumerate(classes):
        (path / name).mkdir(parents=True)
        for number in range(count):
            picture(100 * position + number, **options).save(path / name / f"{number}.png")
    return path


def parts(dataset: data.Dataset) -> list[data.Split]:
    """With all images in memory."""
    return [replace(part, images=part.images[:]) for part in (dataset.train, dataset.validation, dataset.test)]


def test_class_folders_are_divided_always_in_the_same_way(tmp_path: Path) -> None:
    path = folder(tmp_path / "pets", count=20)
    (path / "cat" / ".hidden").write_text("not part of it")
    dataset, again = data.load(str(path)), data.load(str(path))
    assert dataset.name == "pets" and dataset.class_names == ("cat", "dog") and dataset.value_range == (0.0, 1.0)
    assert [len(part) for part in parts(dataset)] == [26, 6, 8]
    assert dataset.fingerprint() == again.fingerprint()
    seen = []
    for part in parts(dataset):
        assert part.images.shape[1:] == (3, 8, 8) and part.images.dtype == torch.float32
        values = (part.images[:, 0, 0, 0] * 255).round().int()
        assert torch.equal((values >= 100).long(), part.labels)
        assert set(part.labels.tolist()) == {0, 1}
        seen += values.tolist()
    assert sorted(seen) == [100 * label + number for label in range(2) for number in range(20)]
    picture(7).save(path / "cat" / "0.png")
    assert data.load(str(path)).fingerprint() != dataset.fingerprint()


def test_part_folders_are_taken_as_they_are(tmp_path: Path) -> None:
    folder(tmp_path / "train", count=10)
    folder(tmp_path / "test", ("dog",), count=2)
    without = data.load(str(tmp_path))
    assert [len(part) for part in parts(without)] == [16, 4, 2]
    assert without.test.labels.tolist() == [1, 1]
    folder(tmp_path / "val", count=3)
    assert [len(part) for part in parts(data.load(str(tmp_path)))] == [20, 6, 2]
    folder(tmp_path / "test" / "more", ("x",))
    picture(1).save(tmp_path / "test" / "more" / "picture.png")
    with pytest.raises(ValueError, match="test holds class 'more', which .*train lacks"):
        data.load(str(tmp_path))


def test_damaged_and_odd_files_are_named_and_skipped(tmp_path: Path) -> None:
    path = folder(tmp_path / "pets", count=6)
    whole = (path / "cat" / "0.png").read_bytes()
    (path / "cat" / "half.png").write_bytes(whole[: len(whole) // 2])
    (path / "cat" / "note.txt").write_text("not an image")
    (path / "dog" / "empty.jpg").write_bytes(b"")
    Image.fromarray(np.ones((8, 8), np.float32)).save(path / "dog" / "float.tiff")
    Image.fromarray(np.ones((8, 8), np.uint16)).save(path / "dog" / "wide.png")
    dataset = data.load(str(path))
    assert sum(map(len, parts(dataset))) == 12
    names = [sentence.split(":")[0] for sentence in dataset.skipped]
    assert [Path(name).name for name in names] == ["half.png", "note.txt", "empty.jpg", "float.tiff", "wide.png"]
    assert all("more than 8 bits" in sentence for sentence in dataset.skipped[-2:])


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (picture(51, mode="L"), [0.2]),
        (picture(1, mode="1"), [1.0]),
        (picture(51), [0.2] * 3),
        (Image.new("RGBA", (8, 8), (255, 51, 0, 51)), [0.2, 0.04, 0.0]),
        (Image.new("LA", (8, 8), (255, 51)), [0.2]),
        (Image.new("CMYK", (8, 8), (0, 0, 0, 204)), [0.2] * 3),
        (Image.new("RGB", (8, 8), (255, 51, 0)).convert("P", palette=Image.Palette.ADAPTIVE), [1.0, 0.2, 0.0]),
    ],
    ids=["grey", "1 bit", "color", "transparent", "grey and transparent", "cmyk", "palette"],
)
def test_pixels_of_every_mode(image: Any, expected: list[float]) -> None:
    pixels = images.pixels(image)
    assert pixels.shape == ((8, 8) if len(expected) == 1 else (8, 8, 3)) and pixels.dtype == np.uint8
    np.testing.assert_allclose(pixels[3, 4] / np.iinfo(pixels.dtype).max, np.squeeze(expected), atol=1 / 510)
    assert np.ptp(pixels, (0, 1)).max() == 0


def test_marks_of_rotation_are_followed(tmp_path: Path) -> None:
    image = Image.new("L", (4, 2))
    image.putpixel((0, 0), 255)
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(tmp_path / "turned.png", exif=exif)
    with Image.open(tmp_path / "turned.png") as turned:
        pixels = images.pixels(turned)
    assert pixels.shape == (4, 2) and pixels[0, 1] == 255


def test_grey_images_among_colored_ones_become_colored(tmp_path: Path) -> None:
    path = folder(tmp_path, count=4)
    picture(51, mode="L").save(path / "dog" / "0.png")
    dataset = data.load(str(path))
    everything = torch.cat([part.images for part in parts(dataset)])
    assert everything.shape == (8, 3, 8, 8)
    assert torch.equal(everything[:, 0], everything[:, 2])


def test_different_sizes_need_image_size(tmp_path: Path) -> None:
    path = folder(tmp_path, count=4)
    picture(9, (12, 6)).save(path / "dog" / "wide.png")
    with pytest.raises(ValueError, match=r"0\.png has 8x8 pixels and .*wide\.png has 12x6 pixels\); set image_size"):
        data.load(str(path))
    dataset = data.load(str(path), image_size=5)
    assert all(part.images.shape[1:] == (3, 5, 5) for part in parts(dataset))


def test_image_size_takes_the_middle_square() -> None:
    image = np.zeros((1, 1, 4, 8), np.float32)
    image[..., 2:6] = 1
    assert (images.fitted(image, 2) == 1).all()
    assert images.fitted(image, None) is image


def test_what_is_no_image_in_a_folder_is_named_and_not_followed(tmp_path: Path) -> None:
    path, elsewhere = folder(tmp_path / "pets"), folder(tmp_path / "elsewhere")
    for name in (".ipynb_checkpoints", "more"):
        shutil.copytree(elsewhere / "cat", path / "cat" / name)
    (path / "cat" / "gone.png").symlink_to("nowhere")
    (path / "cat" / "up").symlink_to("..")
    (path / "cat" / "linked.png").symlink_to(elsewhere / "dog" / "0.png")
    os.mkfifo(path / "cat" / "pipe.png")
    (path / "cat" / "two\nlines.png").write_text("not an image")
    (path / "owl").symlink_to(elsewhere / "dog")  # a class that lies elsewhere
    dataset = data.load(str(path))
    assert dataset.class_names == ("cat", "dog", "owl")
    assert sum(map(len, parts(dataset))) == 5 + 5 + 1 + 5 + 5  # more and linked.png are the cat's
    neither = "not a readable file, or a link to a folder below a class"
    assert sorted(sentence.removeprefix(f"{path}/cat/").partition(": ")[::2] for sentence in dataset.skipped) == [
        ("gone.png", neither),
        ("pipe.png", neither),
        (r"two\nlines.png", rf"cannot identify image file '{path}/cat/two\nlines.png'"),
        ("up", neither),
    ]


def test_a_class_that_cannot_be_looked_into_is_not_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, scandir = folder(tmp_path / "pets"), os.scandir

    def closed(given: Any) -> Any:
        if str(given).endswith("dog"):
            raise PermissionError(13, "Permission denied", str(given))
        return scandir(given)

    monkeypatch.setattr(os, "scandir", closed)
    with pytest.raises(
        ValueError, match=r"class 'dog' has no image that can be read in .*dog: its images cannot be read: Permission"
    ):
        data.load(str(path))


def test_images_that_no_disk_holds_are_refused(tmp_path: Path) -> None:
    path = folder(tmp_path / "pets", count=3)
    with pytest.raises(ValueError, match=r"6 images take [\d,.]+ GiB in .*; choose another folder in EXACTQAT_CACHE"):
        data.load(str(path), 10**6)


def test_many_files_are_read_when_they_are_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder(tmp_path / "pets", count=30)
    monkeypatch.setattr(data, "MOST_CHECKED", 20)
    monkeypatch.setattr(data, "SAMPLE", 5)
    opened: list[str] = []
    original = images.Files._decode
    monkeypatch.setattr(images.Files, "_decode", lambda self, number: opened.append(number) or original(self, number))
    dataset = data.load(str(path))
    first = dataset.fingerprint()
    assert len(opened) <= 12 and dataset.train.images.shape[1:] == (3, 8, 8)
    values = (dataset.train.images[:][:, 0, 0, 0] * 255).round().int()
    assert torch.equal((values >= 100).long(), dataset.train.labels) and 39 <= len(opened) <= 52
    dataset.train.images[torch.arange(10)]  # are there
    assert len(opened) <= 52 and data.load(str(path)).fingerprint() == first
    with pytest.raises(ValueError, match="cannot be read: .*Of so many files a sample is read before"):
        for number in range(30):
            (path / "cat" / f"{number}.png").write_text("no image")
        data.load(str(path)).train.images[:]


def test_arrays_stay_on_disk(tmp_path: Path) -> None:
    x, y = np.arange(12 * 30, dtype=np.float32).reshape(12, 6, 5), np.arange(12) % 2
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "data.npz", x=x, y=y)
        assert isinstance(data.load(str(tmp_path / "data.npz")).train.images, images.Images)


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    path = folder(tmp_path / "pets")
    (path / "bird").mkdir()
    with pytest.raises(ValueError, match="class 'bird' has no image that can be read in .*bird: it is empty"):
        data.load(str(path))
    (path / "bird" / "a.txt").write_text("tweet")
    with pytest.raises(ValueError, match=r"class 'bird' has no image .*bird/a\.txt: cannot identify"):
        data.load(str(path))
    with pytest.raises(
        ValueError, match=r"/here/cats must contain at least two classes, but contains only class 'cat'"
    ):
        data.load(str(folder(tmp_path / "here" / "cats", ("cat",))))
    with pytest.raises(ValueError, match=r"/here/few: class 'cat' has 2 examples to divide, at least 3 are needed"):
        data.load(str(folder(tmp_path / "here" / "few", count=2)))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="must contain one folder of images per class, but contains no folder"):
        data.load(str(tmp_path / "empty"))
    with pytest.raises(ValueError, match="one folder of images per class, got 'faces'"):
        data.load("faces")


def test_parts_are_no_classes(tmp_path: Path) -> None:
    for name in ("Train", "TEST"):
        folder(tmp_path / "capitals" / name)
    dataset = data.load(str(tmp_path / "capitals"))
    assert dataset.class_names == ("cat", "dog")
    folder(tmp_path / "capitals" / "train")
    with pytest.raises(ValueError, match="capitals holds Train and train, which are the same part"):
        data.load(str(tmp_path / "capitals"))
    for parts in (("train",), ("train", "val"), ("Training", "valid")):
        path = tmp_path / "-".join(parts)
        for name in parts:
            folder(path / name)
        with pytest.raises(ValueError, match=f"holds {' and '.join(parts)}, but no folder test; without one"):
            data.load(str(path))
    # Vehicles.
    assert data.load(str(folder(tmp_path / "vehicles", ("bus", "train")))).class_names == ("bus", "train")


def saved(path: Path, **arrays: Any) -> str:
    np.savez(path / "data.npz", **arrays)
    return str(path / "data.npz")


def test_arrays_of_every_layout_and_dtype(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    bytes_ = generator.integers(0, 256, (12, 6, 5), dtype=np.uint8)
    y = np.arange(12) % 2
    expected = {tuple(image.ravel()) for image in (bytes_ / np.float32(255)).astype(np.float32)}
    for x in (bytes_, bytes_[..., None], bytes_[:, None], bytes_ * np.uint16(257), (bytes_ / np.float32(255))):
        dataset = data.load(saved(tmp_path, x=x, y=y))
        assert dataset.train.images.shape[1:] == (1, 6, 5) and dataset.value_range == (0.0, 1.0)
        found = torch.cat([part.images for part in parts(dataset)]).flatten(1).numpy()
        assert {tuple(image) for image in found} == expected
    wide = data.load(saved(tmp_path, x=bytes_.astype(np.float64) - 100, y=np.array(["b", "a"])[y]))
    assert wide.value_range == (float(bytes_.min()) - 100, float(bytes_.max()) - 100)
    assert wide.class_names == ("a", "b")
    numbers = data.load(saved(tmp_path, x=bytes_, y=y * 8 + 2))
    assert numbers.class_names == ("2", "10")
    given = data.load(saved(tmp_path, x_train=bytes_, y_train=y, x_test=bytes_[:3], y_test=y[:3]))
    assert [len(part) for part in parts(given)] == [10, 2, 3]


def test_arrays_that_cannot_be_used(tmp_path: Path) -> None:
    x, y = np.zeros((12, 6, 5), np.float32), np.arange(12) % 2
    refused: list[tuple[dict[str, Any], str]] = [
        ({"x": x}, "must contain arrays named x and y, or x_train.*it contains x$"),
        ({"x": x, "y": y[:5]}, r"y must have one label for each of 12 examples, got shape \[5\]"),
        ({"x": x, "y": y * 0.5}, "y must contain integers or strings, got dtype float64"),
        ({"x": x.astype(str), "y": y}, "x must contain numbers, got dtype <U"),
        ({"x": x[0], "y": y[:6]}, r"x must be \[n, height, width\].*got shape \[6, 5\]"),
        ({"x": x[..., None].repeat(7, 3), "y": y}, r"with 1 to 4 channels, got shape \[12, 6, 5, 7\]"),
        ({"x": x, "y": y * 0}, "only class '0'"),
        (
            {"x": x, "y": np.array([{}] * 12)},
            r"cannot be read as an \.npz file: y contains Python objects; save .*astype",
        ),
        ({"x": x[:0], "y": y[:0]}, "x is empty"),
        ({"x_train": x, "y_train": y, "x_test": x, "y_test": y + 1}, "'test' holds class '2', which the training part"),
        ({"x_train": x, "y_train": y, "x_test": x[:, 1:], "y_test": y}, "the parts differ in the shape"),
    ]
    for arrays, message in refused:
        with pytest.raises(ValueError, match=message):
            data.load(saved(tmp_path, **arrays))
    path = tmp_path / "damaged.npz"
    for content in (b"", b"PK\x03\x04 and nothing else", Path(saved(tmp_path, x=x, y=y)).read_bytes()[:300]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"cannot be read as an \.npz file"):
            data.load(str(path))
    for content in (b"x,y\n1,2\n", pickle.dumps({"x": 1}), b"\xff\xd8\xff a photo"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"npz file: it is not an archive of arrays such as numpy.savez writes$"):
            data.load(str(path))
    with pytest.raises(ValueError, match=r"none\.npz cannot be read"):
        data.load(str(tmp_path / "none.npz"))


def test_images_that_hold_no_numbers_are_refused(tmp_path: Path) -> None:
    x, y = np.zeros((12, 6, 5), np.float32), np.arange(12) % 2
    for number, strange in ((7, -np.inf), (3, np.nan)):
        x[number, 2, 2] = strange
        with pytest.raises(ValueError, match=f"x and y, example {number}: contains NaN or infinity"):
            data.load(saved(tmp_path, x=x, y=y))


@pytest.mark.slow
def test_skipped_images_are_shown_and_counted(tmp_path: Path) -> None:
    pytest.importorskip("typer")
    path = folder(tmp_path / "pets", count=4)
    (path / "dog" / "note.txt").write_text("not an image")
    code = (
        "import sys; from rich.console import Console; from exactqat.cli import commands\n"
        "from exactqat.application.job import data\n"
        "commands._print_skipped(Console(width=1000), data.load(sys.argv[1]).skipped * 30)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True, timeout=60
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 22 and "note.txt" in lines[0]
    assert lines[-2:] == ["… and 10 more, all listed in metrics.json", "images that could not be used: 30"]


def test_rendered_letters_are_the_same_every_time_and_fill_their_images() -> None:
    first, second = glyphs.rendered(0), glyphs.rendered(0)
    assert first[0].tobytes() == second[0].tobytes() and (first[1] == second[1]).all()
    assert (glyphs.rendered(1)[0] != first[0]).any()
    images, letters = first
    count = glyphs.RENDERINGS * len(glyphs.FONTS)
    assert images.shape == (26 * count, glyphs.SIZE, glyphs.SIZE) and images.dtype == np.uint8
    assert sorted(set(letters)) == list(glyphs.LETTERS) and (letters == "A").sum() == count
    means = images.reshape(26, glyphs.RENDERINGS, len(glyphs.FONTS), glyphs.SIZE, glyphs.SIZE).astype(float).mean(1)
    # Every font has every letter: what is drawn is brighter than noise, and no two letters are alike.
    middle = means[:, :, 4:12, 4:12].max((2, 3))
    assert middle.min() > 90
    flat = means.mean(1).reshape(26, -1)
    distances = np.abs(flat[:, None] - flat[None]).mean(-1) + 255 * np.eye(26)
    assert distances.min() > 3


def test_glyphs_are_data_of_a_job(tmp_path: Path) -> None:
    path = tmp_path / "glyphs.npz"
    subprocess.run([sys.executable, glyphs.__file__, path], check=True)
    dataset = data.load(str(path), 12)
    assert dataset.class_names == tuple(glyphs.LETTERS) and dataset.value_range == (0.0, 1.0)
    assert dataset.train.images.shape[1:] == (1, 12, 12)
    assert len(dataset.train) + len(dataset.validation) + len(dataset.test) == 26 * 16 * glyphs.RENDERINGS


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_does_not_grow_with_the_data(tmp_path: Path) -> None:
    def mebibytes() -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) >> 10

    x = np.random.default_rng(0).integers(0, 256, (400, 256, 256, 3), np.uint8)  # 75 MiB
    for number, pixels in enumerate(x):
        path = tmp_path / "photos" / f"class{number % 2}" / f"{number}.bmp"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    np.savez(tmp_path / "data.npz", x=x, y=np.arange(400) % 2)
    np.savez_compressed(tmp_path / "packed.npz", x=x, y=np.arange(400) % 2)
    del x
    data.load(str(folder(tmp_path / "small"))).fingerprint()
    for name in ("photos", "data.npz", "packed.npz"):
        before = mebibytes()
        dataset = data.load(str(tmp_path / name))
        dataset.fingerprint()
        for part in (dataset.train, dataset.validation, dataset.test):
            for block in part.images.split(16):
                assert block.shape[1:] == (3, 256, 256)
        assert mebibytes() - before < 50, name


def test_the_same_images_have_one_fingerprint(tmp_path: Path) -> None:
    x, y = np.random.default_rng(0).integers(0, 256, (30, 6, 5, 3), np.uint8), np.arange(30) % 2
    prints = []
    for name, array in {"last": x, "first": x.transpose(0, 3, 1, 2), "signed": x.view(np.int8), "other": x ^ 1}.items():
        np.savez(tmp_path / f"{name}.npz", x=array, y=y)
        prints.append(data.load(str(tmp_path / f"{name}.npz")).fingerprint())
    assert prints[0] == prints[1] and len(set(prints)) == 3


def test_reading_says_how_far_it_is(tmp_path: Path) -> None:
    for number in range(600):
        path = tmp_path / f"class{number % 2}" / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(np.full((4, 4), number % 251, np.uint8)).save(path)
    counts: list[tuple[int, int]] = []
    data.load(str(tmp_path), tell=lambda *numbers: counts.append(numbers))
    assert counts[0] == (0, 1200) and counts[-1] == (1200, 1200) and len(counts) > 4 and counts == sorted(counts)
