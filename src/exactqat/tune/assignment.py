# SPDX-License-Identifier: Apache-2.0
"""Bits for each layer of a network: as rules, and as the plan and the numbers those rules make."""

from __future__ import annotations

import glob
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from ..deploy.simulate import unclaimed
from ..kit.planning import plan as planned
from ..kit.planning.plans import Plan, PlanInput, PlanStep
from ..kit.planning.rules import Rule
from .network import Candidate, Ends
from .precisions import Part, layer_of
from .ranges import chosen
from .variants import Seen

# With fewer bits, ranges are chosen by the least squared error; with more, clipping costs more than it saves.
FEW = 8

# Bits of every part.
Bits = Mapping[Part, int]


class Assignments:
    """The ways to assign bits to a calibrated network, layer by layer.

    Attributes:
        base: the network as it was calibrated.
        options: the bits that each part may have, from the most to the fewest, in order of execution.
        given: the bits of each in the base.
        left_out: layers that keep their bits, and why.
    """

    def __init__(
        self,
        base: Candidate,
        seen: Mapping[str, Seen],
        weight_bits: Sequence[int],
        activation_bits: Sequence[int],
        keep: Collection[str] = (),
    ) -> None:
        """
        Args:
            seen: what the base's grids hold.
            keep: globs of layers, or of their weights or results, that keep the bits of the base.
        """
        self.base, self._seen, self._keep, plan = base, seen, keep, base.plan
        self._unclaimed = unclaimed(base.graph(), base.device)
        # A final softmax is outside the file, or there is none.
        self._keep_final = not any(step.outside for step in plan.steps)
        self.options: dict[Part, tuple[int, ...]] = {}
        self.given: dict[Part, int] = {}
        self.left_out: dict[str, str] = {}
        self._grid_of = {step.path: step.grid for step in plan.stored_steps}
        # A grid belongs to the first layer that stores on it.
        self._part_of_grid: dict[str, Part] = {}
        for step in plan.stored_steps:
            weights = step.weights if isinstance(step, PlanStep) else None
            if weights is not None:
                self._offer(Part(step.path, True), weights.rule.weight_bits, weight_bits)
            part = self._part_of_grid.setdefault(step.grid, Part(step.path, False))
            on_device = isinstance(step, PlanInput) or (step.kind and not step.left_out)
            if part.layer == step.path and step.grid in plan.grids and on_device:
                grid = plan.grids[step.grid]
                # Where the device fixes the grid, it has 8 bits or 16.
                self._offer(part, grid.bits, [bits for bits in activation_bits if grid.fixed is None or bits >= FEW])

    def _offer(self, part: Part, now: int, wanted: Sequence[int]) -> None:
        kept = not wanted or any(part.named_by(pattern) for pattern in self._keep)
        self.options[part], self.given[part] = (now,) if kept else tuple(sorted(set(wanted), reverse=True)), now

    def require_possible(self) -> None:
        """Removes bits that a layer cannot have by itself, and says so in `left_out`."""
        start = self.nearest()
        for part, options in list(self.options.items()):
            possible = []
            for bits in options:
                try:
                    self.candidate({**start, part: bits})
                except ValueError as error:
                    self.left_out[f"{part} in {bits} bits"] = str(error).splitlines()[0]
                else:
                    possible.append(bits)
            self.options[part] = tuple(possible) or (start[part],)

    def attempt(self, bits: Bits) -> Candidate | None:
        """As `candidate`; None: the device has no such network."""
        try:
            return self.candidate(bits)
        except ValueError:
            return None

    def nearest(self, weights: int = FEW, results: int = FEW) -> dict[Part, int]:
        """The same bits for all weights and for all results, or the nearest to that."""
        wanted = {True: weights, False: results}
        return {
            part: min(options, key=lambda bits: abs(bits - wanted[part.weights]))  # noqa: B023
            for part, options in self.options.items()
        }

    def finest(self) -> dict[Part, int]:
        """The most bits for all."""
        return {part: options[0] for part, options in self.options.items()}

    def part_of(self, path: str, weights: bool = False) -> Part | None:
        """The part that decides for a layer."""
        part = Part(path, True) if weights else self._part_of_grid.get(self._grid_of.get(path, ""))
        return part if part in self.options else None

    # --- as rules -----------------------------------------------------------------------------------------------------

    def rules(self, bits: Bits) -> tuple[Rule, ...]:
        """The rules that give every layer these bits: a line for each layer that differs from most."""
        of_base, wanted = self.base.plan.rules, dict[str, Rule]()
        for step in self.base.plan.stored_steps:
            if step.path in of_base:
                rule = of_base[step.path]
                weights, result = (self.part_of(step.path, of_weights) for of_weights in (True, False))
                wanted[step.path] = replace(
                    rule,
                    match="*",
                    weight_bits=rule.weight_bits if weights is None else bits[weights],
                    activation_bits=rule.activation_bits if result is None else bits[result],
                )
        counts = Counter(wanted.values())
        # Constant operands have as many bits as weights: no layer's are changed incidentally.
        steady = [of_base[path].weight_bits for path in wanted if self.part_of(path, True) is None]
        allowed = [rule for rule in counts if not steady or rule.weight_bits in steady]
        usual = max(allowed or list(counts), key=lambda rule: counts[rule])
        lines: list[Rule] = []
        for path, rule in wanted.items():
            if rule == usual:
                continue
            own = replace(rule, match=glob.escape(path))
            # A second call of a layer has the layer's name and a number; the layer's rules apply to it too.
            calls = [at for at, line in enumerate(lines) if own.match.startswith(f"{line.match}_")]
            lines.insert(calls[0] if calls else len(lines), own)
        return (*lines, usual)

    # --- as networks --------------------------------------------------------------------------------------------------

    def candidate(self, bits: Bits) -> Candidate:
        """The network under the rules of these bits, with ranges from the base's.

        Raises:
            ValueError: the device has no such network, or it is not shown to equal its runtime, although the base is.
        """
        base = self.base
        plan = planned(base.plan.network, self.rules(bits), keep_final_activation=self._keep_final)
        ranges: dict[str, Ends] = {}
        for name, grid in plan.grids.items():
            low, high = _joined([self._ends(plan, step.path) for step in plan.stored_steps if step.grid == name])
            origin = self._grid_of.get(name, "")
            free = grid.fixed is None and grid.rule.ranges != "fixed"
            if free and grid.bits < FEW and origin in self._seen:
                low, high = chosen("least squares", self._seen[origin], plan, name)
            elif free and origin in self._seen and (grid.bits > FEW or base.plan.grids[origin].bits < grid.bits):
                # Clipping gains nothing on a grid this fine, or was meant for a coarser one.
                low, high = min(low, self._seen[origin].least), max(high, self._seen[origin].most)
            ranges[name] = (low, high)
        # Steps of other kinds may read the user's tensors in another form.
        candidate = replace(base, plan=plan, ranges=ranges, tensors={**base.given, **base.tensors}).settled()
        new = set(unclaimed(candidate.graph(), base.device)) - set(self._unclaimed)
        if new:
            raise ValueError(f"equality of {', '.join(sorted(new))} with {base.device}'s runtime has not been shown")
        return candidate

    def _ends(self, plan: Plan, path: str) -> Ends:
        """The range of a stored tensor: the base's, or that of what it is made of."""
        if path in self._grid_of:
            return self.base.ranges[self._grid_of[path]]
        operands = getattr(plan.stored(path), "operands", ())
        return _joined([self._ends(plan, operand) for operand in operands if plan.is_stored(operand)])


def multiply_adds(candidate: Candidate) -> float:
    """Multiply-adds for one example, in units of 8 by 8 bits: one of 16 by 8 bits counts as two, one of 4 by 8 as a
    half."""
    plan, graph = candidate.plan, candidate.graph()
    steps, total = {step.path: step for step in plan.steps}, 0.0
    for operator in graph.operators:
        count = graph.multiply_accumulates(operator)
        step = steps.get(layer_of(operator.outputs[0]))
        if not count or step is None:
            total += count
            continue
        read = [plan.grids[plan.stored(name).grid].bits for name in step.operands if plan.is_stored(name)]
        first, second = read[0], (step.weights.rule.weight_bits if step.weights is not None else read[-1])
        total += count * first * second / 64
    return total


def _joined(ends: Sequence[Ends]) -> Ends:
    return min((low for low, _ in ends), default=0.0), max((high for _, high in ends), default=0.0)
