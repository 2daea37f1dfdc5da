# SPDX-License-Identifier: Apache-2.0
"""What detectors end with in others' files: boxes decoded from anchors, and the best of them that do not overlap.

Computed in real numbers, as the runtimes do; their exponentials are their own, so no equality is claimed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .arithmetic import Tensors
from .floating import Floating
from .operator import REQUIRED, Attributes, Call, Fields, FileOperator, Shape, Unreadable, need, register
from .tensor import Tensor

# Of results, which a small file may ask for.
MOST_DETECTIONS = 1 << 16
# Of a box: its center, height and width.
COORDINATES = 4


@register
class DetectionPostprocess(Floating):
    """The boxes of a detector.

    Operands: boxes [1, anchors, 4], center and size in steps of the anchors; scores [1, anchors, classes], with or
    without one for the background, which comes first; anchors [anchors, 4], a constant. Results: boxes [1, n, 4] as
    lowest and highest places, classes [1, n], scores [1, n] and how many were found, [1]; what is beyond these is 0
    here, and with fast suppression whatever lay in memory in LiteRT.

    Attributes: `most` boxes and `classes_of_a_box` results of each; `scores_from` and `overlap_below`, what is left;
    `classes`; `scales` of y, x, height and width; `each_class`: whether boxes of different classes may overlap, of each
    class the best `most_of_a_class`.
    """

    kind = "DETECTION_POSTPROCESS"
    custom_code = "TFLite_Detection_PostProcess"
    attributes = {
        "most": REQUIRED,
        "classes_of_a_box": REQUIRED,
        "classes": REQUIRED,
        "scores_from": REQUIRED,
        "overlap_below": REQUIRED,
        "scales": REQUIRED,
        "each_class": False,
        "most_of_a_class": 100,
    }
    operands = (3, 3)
    weights = (2,)
    dequantizes = True
    any_batch = False

    def shape(self, shapes: Sequence[Shape], attributes: Attributes) -> Shape:
        return self.shapes(shapes, attributes)[0]

    def shapes(self, shapes: Sequence[Shape], attributes: Attributes) -> tuple[Shape, ...]:
        boxes, scores, anchors = shapes
        count, classes = anchors[0], attributes["classes"]
        fits = len(anchors) == 2 and anchors[1] == COORDINATES and tuple(boxes) == (1, count, COORDINATES)
        need(fits, f"boxes and anchors must be [1, n, 4] and [n, 4], got {list(boxes)} and {list(anchors)}")
        fits = len(scores) == 3 and tuple(scores[:2]) == (1, count) and scores[2] in (classes, classes + 1)
        need(fits, f"scores must be [1, {count}, {classes}] or one more, got {list(scores)}")
        multiplicity = 1 if attributes["each_class"] else min(attributes["classes_of_a_box"], classes)
        results = attributes["most"] * multiplicity
        need(1 <= results <= MOST_DETECTIONS, f"the results must be 1 to {MOST_DETECTIONS}, got {results}")
        return (1, results, COORDINATES), (1, results), (1, results), (1,)

    def check_attributes(self, attributes: Attributes) -> None:
        super().check_attributes(attributes)
        for name in ("most", "classes_of_a_box", "classes", "most_of_a_class"):
            need(attributes[name] >= 1, f"{name} must be 1 or more, got {attributes[name]}")
        scales = attributes["scales"]
        fits = len(scales) == COORDINATES and all(np.isfinite(scale) and scale > 0 for scale in scales)
        need(fits, f"scales must be four positive numbers, got {scales}")
        overlap = attributes["overlap_below"]
        need(0 < overlap <= 1, f"overlap_below must be above 0 and at most 1, got {overlap}")

    def all_results(self, call: Call) -> tuple[np.ndarray, ...]:
        several = not call.attributes["each_class"] and call.attributes["classes_of_a_box"] > 1
        fits = not several or call.profile.runtime != "tflite-micro"
        need(fits, "TFLite-Micro writes several classes of a box beyond the end of its results")
        with np.errstate(all="ignore"):
            rows = [
                detected(boxes, scores, call.codes[2], call.attributes)
                for boxes, scores in zip(*call.codes[:2], strict=True)
            ]
        shapes = [tensor.shape for tensor in call.outputs]
        return tuple(
            np.stack(column).astype(np.float32).reshape(-1, *shape[1:])
            for column, shape in zip(zip(*rows, strict=True), shapes, strict=True)
        )

    def tflite_options(self, inputs: Tensors, output: Tensor, attributes: Attributes) -> Fields:
        scales = {f"{name}_scale": float(scale) for name, scale in zip("yxhw", attributes["scales"], strict=True)}
        return {**{field: attributes[name] for name, field in FIELDS.items()}, **scales}

    def read_attributes(self, read: FileOperator) -> Attributes:
        options = {name: read.option(field) for name, field in FIELDS.items()}
        scales = tuple(read.option(f"{name}_scale") for name in "yxhw")
        named = {name for name, default in self.attributes.items() if default is REQUIRED}
        if None in scales or any(options[name] is None for name in named - {"scales"}):
            raise Unreadable(f"{self.kind} without its options")
        whole = {name: value for name, value in options.items() if value is not None}
        for name, value in whole.items():
            whole[name] = float(value) if name in REAL else bool(value) if name == "each_class" else int(value)
        return {**options, **whole, "scales": tuple(map(float, scales))}


# Attributes, and what files call them.
FIELDS = {
    "most": "max_detections",
    "classes_of_a_box": "max_classes_per_detection",
    "classes": "num_classes",
    "scores_from": "nms_score_threshold",
    "overlap_below": "nms_iou_threshold",
    "each_class": "use_regular_nms",
    "most_of_a_class": "detections_per_class",
}
REAL = ("scores_from", "overlap_below")


def detected(
    boxes: np.ndarray, scores: np.ndarray, anchors: np.ndarray, attributes: Attributes
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The results for one example."""
    corners = decoded(boxes, anchors, np.asarray(attributes["scales"], np.float32))
    scores = scores[:, scores.shape[1] - attributes["classes"] :]
    pairs: list[tuple[int, int]] = []  # boxes and their classes, the best first
    if attributes["each_class"]:
        for column in range(scores.shape[1]):
            chosen = apart(corners, scores[:, column], attributes["most_of_a_class"], attributes)
            pairs = sorted([*pairs, *((box, column) for box in chosen)], key=lambda pair: -scores[pair])
            pairs = pairs[: attributes["most"]]
    else:
        best = np.argsort(-scores, 1, kind="stable")[:, : attributes["classes_of_a_box"]]
        for box in apart(corners, scores.max(1), attributes["most"], attributes):
            pairs += [(box, int(column)) for column in best[box]]
    multiplicity = 1 if attributes["each_class"] else min(attributes["classes_of_a_box"], attributes["classes"])
    size = attributes["most"] * multiplicity
    results = np.zeros((size, COORDINATES), np.float32), np.zeros(size), np.zeros(size, np.float32)
    for at, pair in enumerate(pairs):
        results[0][at], results[1][at], results[2][at] = corners[pair[0]], pair[1], scores[pair]
    return (*results, np.array([len(pairs) // multiplicity]))


def decoded(boxes: np.ndarray, anchors: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Lowest y and x and highest y and x, of centers and sizes relative to anchors."""
    steps = boxes / scales
    center = steps[:, :2] * anchors[:, 2:] + anchors[:, :2]
    half = np.float32(0.5) * np.exp(steps[:, 2:]) * anchors[:, 2:]
    return np.asarray(np.concatenate([center - half, center + half], 1), np.float32)


def apart(corners: np.ndarray, scores: np.ndarray, most: int, attributes: Attributes) -> list[int]:
    """The boxes with the best scores, without those that overlap a better one."""
    kept = np.flatnonzero(scores >= np.float32(attributes["scores_from"]))
    left = kept[np.argsort(-scores[kept], kind="stable")]
    chosen: list[int] = []
    while left.size and len(chosen) < most:
        first, left = left[0], left[1:]
        chosen.append(int(first))
        left = left[overlap(corners[first], corners[left]) <= np.float32(attributes["overlap_below"])]
    return chosen


def overlap(box: np.ndarray, others: np.ndarray) -> np.ndarray:
    """The shares of the areas of a box and each other one that both have."""
    area, areas = ((corners[..., 2:] - corners[..., :2]).prod(-1) for corners in (box, others))
    sides = np.minimum(box[2:], others[:, 2:]) - np.maximum(box[:2], others[:, :2])
    common = np.maximum(sides, 0).prod(-1)
    return np.where((area <= 0) | (areas <= 0), np.float32(0), common / (area + areas - common))
