# SPDX-License-Identifier: Apache-2.0
"""torchao's PT2E with the quantizer for x86: PTQ and QAT. Its runtime is what torch.compile makes of it, of the better
of both by what is predicted."""

from __future__ import annotations

from typing import Any

import torch
import torchao.quantization.pt2e.quantizer.x86_inductor_quantizer as x86
from exchange import Case, Offer, main, of_module
from networks import in_training, judged
from torchao.quantization.pt2e import allow_exported_model_train_eval, move_exported_model_to_eval
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e, prepare_qat_pt2e


def exported(case: Case, training: bool) -> Any:
    model = in_training(case.task, case.model) if training else case.model.eval()
    example = (torch.from_numpy(case.calibration[:4]),)
    return torch.export.export(model, example, dynamic_shapes=({0: torch.export.Dim("n", min=2)},)).module()


def offers(case: Case) -> list[Offer]:
    case.need_eight()
    graphs: dict[str, Any] = {}
    for rate in (None, *case.rates):
        training = rate is not None
        quantizer = x86.X86InductorQuantizer()
        quantizer.set_global(x86.get_default_x86_inductor_quantization_config(is_qat=training))
        prepared = (prepare_qat_pt2e if training else prepare_pt2e)(exported(case, training), quantizer)
        if rate is not None:
            allow_exported_model_train_eval(prepared)
            prepared.train()
            case.tuned(prepared, rate)
            move_exported_model_to_eval(prepared)
        else:
            with torch.no_grad():
                for batch in torch.from_numpy(case.calibration).split(64):
                    prepared(batch)
        graphs["PTQ" if rate is None else f"QAT {rate:g}"] = convert_pt2e(prepared)
    inputs, targets = case.parts[1]
    best = max(graphs, key=lambda method: judged(case.task, of_module(graphs[method])(inputs), targets))
    offered = []
    for method, graph in graphs.items():
        predicted, runtime = of_module(graph), None
        if method == best:
            torch.compiler.reset()
            runtime = of_module(torch.compile(graph, dynamic=True))
        offered.append(Offer(method, predicted, runtime))
    return offered


if __name__ == "__main__":
    main(offers)
