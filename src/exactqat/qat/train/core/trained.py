# SPDX-License-Identifier: Apache-2.0
"""A trained network, as deployment takes it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ....kit.planning.plans import Numbers
from .arrays import Arrays
from .engine import Functional


class TrainedNetwork:
    """A network with the numbers that training ended with: what `exactqat.deploy` takes.

    Attributes:
        plan: what the device runs.
        frozen: whether its last phase of training has begun; only then can it be lowered.
        profile: whose integers it computes then; None: it stays fake quantized.
        functional: the plan as functions, of `arrays`.
        arrays: in NumPy.
    """

    def __init__(
        self,
        functional: Functional,
        arrays: Arrays,
        frozen: bool,
        computed: Callable[[object, bool], tuple[list[np.ndarray], dict[str, np.ndarray]]],
    ) -> None:
        """
        Args:
            arrays: in NumPy.
            computed: (a batch, nested as the model takes it, whether to quantize) -> the inputs, flat, and what every
                step computes in evaluation, by path; in NumPy.
        """
        self.plan = functional.plan
        self.profile = functional.profile
        self.frozen = frozen
        self.functional = functional
        self.arrays = arrays
        self._computed = computed
        self._numbers: Numbers | None = None

    def numbers(self) -> Numbers:
        """The integers of weights and the grids."""
        if self._numbers is None:
            self._numbers = self.functional.numbers(self.arrays)
        return self._numbers

    def traced(self, batch: object) -> tuple[list[np.ndarray], list[np.ndarray], dict[str, np.ndarray]]:
        """The inputs and results of one call in evaluation, flat, for `deploy.verify`; without final steps that the
        device's network leaves out. And the codes of every tensor that the device stores, as `stored_codes` has them.
        batch: as the model takes it."""
        inputs, values = self._computed(batch, True)
        numbers, paths = self.numbers(), self.functional.stored_paths()
        codes = {path: self.functional.codes(path, values[path], numbers) for path in paths}
        return inputs, [values[path] for path in self.plan.device_outputs], codes

    def stored_codes(self, *inputs: object) -> dict[str, np.ndarray]:
        """Codes of every tensor that the device stores, by layer path, in the user's order of axes."""
        return self.traced(inputs)[2]

    def float_results(self, *inputs: object) -> list[np.ndarray]:
        """What the network returns in evaluation, flat and without quantization."""
        _, values = self._computed(inputs, False)
        return [values[path] for path in self.plan.outputs]

    def layer_values(self, *inputs: object) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """What the float and the fake-quantized network store, by layer path, in the user's order of axes."""
        (_, plain), (_, trained) = (self._computed(inputs, quantizing) for quantizing in (False, True))
        paths = self.functional.stored_paths()
        return {path: plain[path] for path in paths}, {path: trained[path] for path in paths}
