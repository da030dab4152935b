"""Which step of a microbatch adds to a parameter's gradient, said by hand from the parameter's name.

It shares nothing with the package's own notion of which slot owns which module: it is half of the oracle.
"""

from __future__ import annotations

import re
from typing import Any

from tests.support.configs import Cell


def owner(cell: Cell, model: Any, name: str, *, split_combine: bool = False) -> str:
    """The place, as in a step's text without its phase and microbatch, whose B delivers the parameter's gradient.

    For a parameter that several places use, that is the last of them to go backward: the first to go forward.
    """
    last_of_moe = "post_combine" if split_combine else "moe_combine"
    num_decoder = len(cell.layers)
    first_mtp = f"L{num_decoder}.pre_dispatch_computation"
    if name.startswith("embedding."):
        if cell.pre_process:
            return "pre_process"
        return first_mtp if cell.mtp else "post_process"
    if name.startswith("output_layer."):
        return "post_process"
    if name.startswith("decoder.final_layernorm."):
        return f"L{num_decoder - 1}.{last_of_moe if cell.layers[-1] == 'M' else 'mlp'}"
    found = re.match(r"decoder\.layers\.(\d+)\.(.*)", name)
    if found:
        number = int(found[1])
        return f"L{number}.{_slot(found[2], is_moe=cell.layers[number] == 'M', last_of_moe=last_of_moe)}"
    found = re.match(r"mtp\.layers\.(\d+)\.(.*)", name)
    assert found, name
    number, rest = num_decoder + int(found[1]), found[2]
    if rest.startswith("final_layernorm."):
        return f"L{number}.mtp_post_process"
    if rest.startswith(("enorm.", "hnorm.", "eh_proj.")):
        return f"L{number}.pre_dispatch_computation"
    inner = rest.removeprefix("mtp_model_layer.").removeprefix("transformer_layer.")
    is_moe = type(model.mtp.layers[int(found[1])].mtp_model_layer.mlp).__name__ == "MoELayer"
    return f"L{number}.{_slot(inner, is_moe=is_moe, last_of_moe=last_of_moe)}"


def _slot(name: str, *, is_moe: bool, last_of_moe: str) -> str:
    if is_moe:
        if name.startswith("mlp.experts."):
            return "mlp"
        return last_of_moe if name.startswith("mlp.fc2_latent_proj.") else "pre_dispatch_computation"
    return "mlp" if name.startswith(("mlp.", "pre_mlp_layernorm.")) else "pre_dispatch_computation"
