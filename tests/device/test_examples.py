# SPDX-License-Identifier: Apache-2.0
"""Files of examples: the same arrays for training, judging, tuning, inspecting and verifying."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exactqat.deploy.examples import StoredArrays, batches_of, read_examples

X = np.arange(24, dtype=np.float32).reshape(6, 2, 2)
Y = np.array([0, 1, 2, 0, 1, 2])


def saved(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


def test_the_keys_of_training(tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    whole = read_examples(saved(path, x=X, y=Y))
    assert np.array_equal(whole.inputs, X) and np.array_equal(whole.targets, Y)
    parted = saved(path, x_train=X, y_train=Y, x_test=X[:2], y_test=Y[:2], x_val=X[3:], y_val=Y[3:])
    assert len(read_examples(parted).inputs) == 2 and len(read_examples(parted, "validation").inputs) == 3
    parted = saved(path, x_train=X, y_train=Y, x_test=X[:2], y_test=Y[:2])
    assert len(read_examples(parted, "validation").inputs) == 6
    named = read_examples(saved(path, image=X, words=Y, y=Y))
    assert sorted(named.inputs) == ["image", "words"]
    assert read_examples(saved(path, image=X)).targets is None
    np.save(tmp_path / "x.npy", X)
    assert np.array_equal(read_examples(tmp_path / "x.npy").inputs, X)
    # Where the network's inputs are called as targets usually are.
    assert sorted(read_examples(saved(path, x=X, y=Y), names=["x", "y"]).inputs) == ["x", "y"]


def test_classes_by_name(tmp_path: Path) -> None:
    texts, path = np.array(["cat", "ant", "cat", "bee", "ant", "cat"]), tmp_path / "data.npz"
    assert read_examples(saved(path, x=X, y=texts)).targets.tolist() == [2, 0, 2, 1, 0, 2]
    names = ["bee", "cat", "dog", "ant"]
    assert read_examples(saved(path, x=X, y=texts, classes=names)).targets.tolist() == [1, 3, 1, 0, 3, 1]
    assert read_examples(saved(path, x=X, y=Y, classes=names)).targets.tolist() == Y.tolist()
    with pytest.raises(ValueError, match="holds the class '5', which is not one of"):
        read_examples(saved(path, x=X, y=Y + 5, classes=names))
    # Numbered as in training, also where the test part lacks a class.
    parts = {"x_train": X, "y_train": texts, "x_test": X[:1], "y_test": texts[:1]}
    assert read_examples(saved(path, **parts)).targets.tolist() == [2]
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    from exactqat.application.job.data import from_npz

    many = {"x": np.repeat(X, 10, 0), "y": np.repeat(texts, 10)}
    assert from_npz(saved(path, **many, classes=names)).class_names == ("bee", "cat", "ant")


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    for arrays, words in (
        ({"x_train": X, "y_train": Y}, "no examples of the part test: it needs x_test, and holds x_train, y_train"),
        ({"image": X}, "must be an .npz file of the inputs and the classes y; it holds image"),
        ({"y": Y}, "it holds y"),
        ({"x": X, "y": Y[:3]}, "x has 6 examples and y 3"),
        ({"x": np.array(["a"]), "y": Y[:1]}, "x must hold numbers"),
    ):
        with pytest.raises(ValueError, match=words):
            read_examples(saved(path, **arrays), targets_needed=True)
    (tmp_path / "pickle.npz").write_bytes(b"\x80\x04K\x01.")
    with pytest.raises(ValueError, match="is not an archive of arrays"):
        StoredArrays(tmp_path / "pickle.npz")
    with pytest.raises(FileNotFoundError):
        StoredArrays(tmp_path / "none.npz")


@pytest.mark.parametrize("size", [1, 4, 100])
def test_batches_hold_all_examples_once(size: int) -> None:
    for data in (X, (X, Y), [X], [(X[:4], Y[:4]), (X[4:], Y[4:])], iter([X[:1], X[1:]]), {"a": X}):
        parts = [part["a"] if isinstance(part, dict) else part for part in batches_of(data, 1, size)]
        arrays = [part[0] if isinstance(part, list) else part for part in parts]
        assert np.array_equal(np.concatenate(arrays), X) and max(map(len, arrays)) <= size
    for data in ((X, X + 1), ((X, X + 1), Y), (X, X + 1, Y), [((X, X + 1), Y)]):
        parts = [*batches_of(data, 2, size)]
        assert np.array_equal(np.concatenate([part[1] for part in parts]), X + 1)
    with pytest.raises(ValueError, match="the same number of examples"):
        next(batches_of((X, X[1:]), 2, size))
