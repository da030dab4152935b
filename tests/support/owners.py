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


def hybrid_groups(cell: Cell, group: bool | str | None) -> list[int]:
    """For each decoder layer of a ``HybridModel``, the number of its logical layer."""
    pattern = cell.pattern.split("|")[0]
    words = list(pattern)
    if isinstance(group, str):
        words = group.split()
    elif group is not False:
        words = re.findall(r"[^E-]*[E-]|[^E-]+$", pattern)
    return [number for number, word in enumerate(words) for _ in word]


def hybrid_owner(cell: Cell, name: str, group: bool | str | None, *, split_combine: bool = False) -> str:
    """The same as ``owner`` for a ``HybridModel``."""
    groups = hybrid_groups(cell, group)
    num_decoder = groups[-1] + 1 if groups else 0
    pattern = cell.pattern.split("|")[0]
    last_of_moe = "post_combine" if split_combine else "moe_combine"
    first_mtp = f"L{num_decoder}.pre_dispatch_computation"
    if name.startswith("embedding."):
        if cell.pre_process:
            return "pre_process"
        return first_mtp if cell.mtp else "post_process"
    if name.startswith("output_layer."):
        return "post_process"
    if name.startswith("decoder.final_norm."):
        if not groups:
            return "pre_process"
        last = {"E": last_of_moe, "-": "mlp"}.get(pattern[-1], "pre_dispatch_computation")
        return f"L{num_decoder - 1}.{last}"
    found = re.match(r"decoder\.layers\.(\d+)\.(.*)", name)
    if found:
        number = int(found[1])
        layer = groups[number]
        is_last = number == len(groups) - 1 or groups[number + 1] != layer
        return f"L{layer}.{_hybrid_slot(pattern[number], found[2], last_of_moe, is_last=is_last)}"
    found = re.match(r"mtp\.layers\.(\d+)\.(.*)", name)
    assert found, name
    number, rest = num_decoder + int(found[1]), found[2]
    inner = re.match(r"mtp_model_layer\.layers\.(\d+)\.(.*)", rest)
    if inner is None:
        return f"L{number}.{'mtp_post_process' if rest.startswith('final_layernorm.') else 'pre_dispatch_computation'}"
    at = int(inner[1])
    main = cell.mtp_pattern.find("E") if "E" in cell.mtp_pattern else len(cell.mtp_pattern) - 1
    if at > main:
        return f"L{number}.mtp_post_process"
    return f"L{number}.{_hybrid_slot(cell.mtp_pattern[at], inner[2], last_of_moe, is_last=at == main)}"


def _hybrid_slot(symbol: str, name: str, last_of_moe: str, *, is_last: bool) -> str:
    if symbol == "E":
        return _slot(name, is_moe=True, last_of_moe=last_of_moe)
    return "mlp" if symbol == "-" and is_last else "pre_dispatch_computation"
