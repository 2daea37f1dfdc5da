# SPDX-License-Identifier: Apache-2.0
"""An .onnx file in real numbers as a `Network`: one handler for each operator, in `onnx_nodes`.

What depends on constants and shapes alone is computed here, by onnx' own reference; so are the shapes of results.
"""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ....kit.display import listed
from ..core.builder import Moving
from ..core.refusals import CaptureError, Refused
from ..core.sizes import Batch, Shape, for_examples
from . import onnx_moves  # noqa: F401 - its handlers enter themselves
from .onnx_grids import DEQUANTIZE, on_its_grid
from .onnx_integers import in_real_numbers
from .onnx_nodes import HANDLERS, Attributes
from .reader import FileNetwork, Fixed, Item, Reader, Result

if TYPE_CHECKING:
    import onnx

# Of what a file computes from constants alone.
_MOST_VALUES = 2**27
# Numbers of examples with which onnx infers shapes and computes with them: no size of the file's own is a multiple.
_PRIMES = (1009, 1013, 1019, 1021, 1031, 1033, 1039, 1049, 2003, 2011, 2017, 2027, 3001, 3011, 3019, 3023, 4001, 4003)


def capture(content: bytes) -> FileNetwork:
    """The network of an .onnx file, with the file's own axes. What has no step is refused by the plan, all at once.

    Args:
        content: of a file that `deploy.read_onnx` has looked at.

    Raises:
        CaptureError: it is damaged, has inputs that are neither real numbers nor indices, or leaves sizes open
            beside the batch's.
    """
    try:
        reader = OnnxReader(in_real_numbers(_onnx().load_model_from_string(content)))
        for node in reader.model.graph.node:
            reader.read(node)
        outputs = {output.name: reader.known.get(output.name) for output in reader.model.graph.output}
        if missing := [name for name, item in outputs.items() if item is None]:
            raise CaptureError(f"no operator makes the outputs {listed(missing)}")
        return reader.finished({name: f"input:{name}" for name in reader.inputs}, outputs, channels_first=True)
    except (CaptureError, ImportError):
        raise
    except Exception as error:  # noqa: BLE001 - onnx' own checker leaves much of a file unread
        text = " ".join(str(error).split())[:160]
        raise CaptureError(f"the file is damaged ({text or type(error).__name__})") from error


def _onnx() -> Any:
    try:
        return importlib.import_module("onnx")
    except ImportError as error:
        raise ImportError("this needs onnx: pip install 'exactqat[onnx]'") from error


class OnnxReader(Reader):
    """
    Attributes:
        model: of onnx.
        node: that is read.
        inputs: names, without those that have a constant.
        known: by name, what the file's tensors are.
        opset: of the operators without a domain.
        one_example: whether the file's batch is fixed to one.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        self.onnx = _onnx()
        graph = model.graph
        held = {tensor.name: self.onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
        inputs = [info for info in graph.input if info.name not in held]
        sizes = [self._sizes(info) for info in inputs]
        shapes = [(1, *rest) for _, *rest in sizes]
        super().__init__()
        own = [tuple(shape) for shape in (*shapes, *(array.shape for array in held.values()))]
        numbers = {*itertools.chain(*own), *map(math.prod, own)}
        self._examples = next(
            prime for prime in _PRIMES if not any(number and number % prime == 0 for number in numbers)
        )
        self.model = model
        self.inputs = tuple(info.name for info in inputs)
        self.opset = next((opset.version for opset in model.opset_import if opset.domain in ("", "ai.onnx")), 1)
        self.known: dict[str, Item | None] = {name: Fixed(name, array) for name, array in held.items()}
        # What was made for every example, of one, by name.
        self._of_one: dict[str, Fixed] = {}
        # Results that follow from what is refused.
        self._doubtful: set[str] = set()
        self.one_example = all(batch == 1 for batch, *_ in sizes)
        types = {self.onnx.TensorProto.FLOAT: "float32", self.onnx.TensorProto.INT64: "int64",
                 self.onnx.TensorProto.INT32: "int32"}  # fmt: skip
        for info, shape in zip(inputs, shapes, strict=True):
            code = info.type.tensor_type.elem_type
            if code not in types:
                word = self.onnx.TensorProto.DataType.Name(code).lower()
                raise CaptureError(f"input '{info.name}' is {word}; networks get float32, or indices in int32 or int64")
            self.known[info.name] = self.input(f"input:{info.name}", self.traced(shape), types[code])
        if not inputs:
            raise CaptureError("the .onnx file has no inputs")

    @staticmethod
    def _sizes(info: onnx.ValueInfoProto) -> list[int]:
        """As the file says them; 0: an open batch."""
        dims = info.type.tensor_type.shape.dim
        sizes = [dim.dim_value if dim.HasField("dim_value") else None for dim in dims]
        if not sizes or any(size is None or size < 1 for size in sizes[1:]):
            raise CaptureError(
                f"input '{info.name}' has the shape {sizes}; a device's network has fixed sizes beside its batch, the "
                "first axis: export the model for these"
            )
        if sizes[0] not in (None, 0, 1):
            raise CaptureError(f"input '{info.name}' has a fixed batch of {sizes[0]}; leave it open, or make it 1")
        return [int(size or 0) for size in sizes]

    # --- nodes --------------------------------------------------------------------------------------------------------

    def read(self, node: onnx.NodeProto) -> None:
        self.node = node
        self.begin(next(filter(None, node.output)), node.op_type)
        drawn = node.op_type.startswith("Random")
        if not drawn and not any(isinstance(self.known.get(name), Moving) for name in node.input):
            if node.op_type == DEQUANTIZE:
                self.known[node.output[0]] = on_its_grid(self, self.attributes(), *map(self.item, node.input))
            else:
                self.fold(node)
            return
        try:
            if node.domain not in ("", "ai.onnx") or node.op_type not in HANDLERS:
                raise Refused("")
            results = HANDLERS[node.op_type](self, self.attributes(), *map(self.item, node.input))
        except Refused as refused:
            results = self.refused(str(refused))
        except (ValueError, TypeError, LookupError, AttributeError, ZeroDivisionError) as error:
            # The substitute of a refused result may have other axes than this one expects.
            if not self._doubtful.intersection(node.input):
                text = " ".join(str(error).split())[:160]
                raise CaptureError(f"{node.op_type} that makes '{node.output[0]}' is not understood: {text}") from error
            results = self.refused("")
        if self._doubtful.intersection(node.input):
            self._doubtful.update(node.output)
        self.known.update(zip(node.output, results if isinstance(results, list) else [results], strict=False))

    def refused(self, reason: str) -> Result:
        """Substitutes for the results of a node without steps, so that the plan lists it with all others."""
        self._doubtful.update(self.node.output)
        read = [item for name in self.node.input if isinstance(item := self.known.get(name), Moving)]
        shapes = self.shapes(self.node, [(Batch(), 1)] * len(self.node.output))
        return list(self.unsupported(self.word, read, shapes, reason))

    def fold(self, node: onnx.NodeProto) -> None:
        """What depends on no input, by onnx' own meaning.

        Raises:
            CaptureError: it cannot be computed, or takes more than its size allows.
        """
        if any(attribute.HasField("g") or attribute.graphs for attribute in node.attribute):
            raise CaptureError(f"{node.op_type} that makes '{node.output[0]}' is control flow, which networks have not")
        most = max((math.prod(self.in_numbers(shape)) for shape in self.shapes(node, [()])), default=0)
        if most > _MOST_VALUES:
            raise CaptureError(f"{node.op_type} that makes '{node.output[0]}' holds {most:,} numbers")
        operands = {name: item for name in node.input if isinstance(item := self.known.get(name), Fixed)}
        names, imports = [name for name in node.output if name], list(self.model.opset_import)
        function = self.onnx.helper.make_function("folded", "folded", list(operands), names, [node], imports)
        reference = importlib.import_module("onnx.reference")
        try:
            data = {name: item.data for name, item in operands.items()}
            results = reference.ReferenceEvaluator(function).run(None, data, attributes={})
        except Exception as error:  # noqa: BLE001 - a node may hold anything
            text = " ".join(str(error).split())[:200]
            raise CaptureError(f"{node.op_type} that makes '{node.output[0]}': {text}") from error
        self.known |= {name: Fixed(name, np.asarray(array)) for name, array in zip(names, results, strict=True)}

    def in_numbers(self, shape: Shape) -> tuple[int, ...]:
        """A shape for the number of examples with which onnx computes."""
        return tuple(for_examples(tuple(shape), self._examples))

    def in_batches(self, shape: Sequence[int]) -> Shape:
        """A shape that onnx has computed, as it is traced."""
        return tuple(
            Batch(size // self._examples) if size and size % self._examples == 0 else int(size) for size in shape
        )

    def shapes(self, node: onnx.NodeProto, otherwise: Sequence[Shape] | None = None) -> list[Shape]:
        """Of a node's results, as traced, by onnx' own inference."""
        helper, types, data = self.onnx.helper, {}, {}
        for name in filter(None, node.input):
            item = self.known[name]
            assert item is not None
            if isinstance(item, Fixed):
                data[name] = self.onnx.numpy_helper.from_array(np.asarray(item.data), name)
            code = helper.np_dtype_to_tensor_dtype(np.dtype(item.data.dtype if isinstance(item, Fixed) else item.dtype))
            types[name] = helper.make_tensor_type_proto(code, self.in_numbers(item.shape))
        try:
            schema = self.onnx.defs.get_schema(node.op_type, self.opset, node.domain)
            results = self.onnx.shape_inference.infer_node_outputs(
                schema, node, types, data, opset_imports=list(self.model.opset_import)
            )
            return [
                self.in_batches([dim.dim_value for dim in results[name].tensor_type.shape.dim])
                for name in node.output
                if name
            ]
        except Exception as error:  # noqa: BLE001 - inference raises errors of its own
            if otherwise is not None:
                return [tuple(shape) for shape in otherwise]
            raise Refused(f"its shape is not known ({' '.join(str(error).split())[:120]})") from error

    # --- for handlers -------------------------------------------------------------------------------------------------

    @property
    def shape(self) -> Shape:
        """Of the first result of the node that is read, as traced."""
        return self.shapes(self.node)[0]

    @property
    def outputs(self) -> Sequence[str]:
        """What the file calls the results of the node that is read; empty: they are left out."""
        return self.node.output

    def item(self, name: str) -> Item | None:
        """An operand; None: it is left out."""
        item = self.known[name] if name else None
        if isinstance(item, Fixed) and self.batch_axes(self.in_batches(item.shape)):
            item = self._of_one.setdefault(name, Fixed(name, self.without_batch(item.data)))
        return item

    def without_batch(self, values: np.ndarray) -> np.ndarray:
        """What was made for every example of the batch, and is the same for all, of one."""
        for axis in self.batch_axes(self.in_batches(values.shape)):
            first = values.take(range(values.shape[axis] // self._examples), axis)
            if np.array_equal(values, np.concatenate([first] * self._examples, axis)):
                values = first
        return values

    def constant(self, item: Fixed) -> str:
        if self.batch_axes(self.in_batches(item.shape)):
            raise Refused(f"'{item.name}' holds numbers for each example of a batch")
        return super().constant(item)

    def fixed(self, item: Item | None) -> np.ndarray | None:
        """An operand that must be a constant; None: it is left out.

        Raises:
            Refused: it is computed.
        """
        if isinstance(item, Moving):
            raise Refused("an operand that must be fixed is computed from the network's input")
        return None if item is None else np.asarray(item.data)

    def integers(self, item: Item | None, otherwise: Sequence[int] | None = None) -> list[int]:
        """A fixed operand of integers; where it is left out, the attribute that other opsets have for it."""
        values = self.fixed(item)
        return list(map(int, otherwise or () if values is None else values.reshape(-1)))

    def attributes(self) -> Attributes:
        """Of the node that is read, with ONNX' own defaults."""
        value_of, node, defs = self.onnx.helper.get_attribute_value, self.node, self.onnx.defs
        held = {attribute.name: value_of(attribute) for attribute in node.attribute}
        if defs.has(node.op_type, self.opset, node.domain):
            known = defs.get_schema(node.op_type, self.opset, node.domain).attributes
            held = {
                name: value_of(schema.default_value) for name, schema in known.items() if schema.default_value.type
            } | held
        return Attributes({name: data.decode() if isinstance(data, bytes) else data for name, data in held.items()})
