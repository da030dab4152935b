"""Refuses, before anything runs, a ``HybridModel`` that the split path would not run as the plain model does."""

from __future__ import annotations

from typing import Any

from layernodes.errors import UnsupportedLayerError

_GRAPHS = ("none", "full_iteration")


def check_hybrid_model(model: Any) -> None:
    """Raise UnsupportedLayerError, naming field and value, where the model is not handled; its layers are checked when
    their plans are built."""
    config = model.config
    if config.cuda_graph_impl not in _GRAPHS:
        raise UnsupportedLayerError(
            f"cuda_graph_impl={config.cuda_graph_impl!r} captures layers of a HybridModel as the plain stack calls "
            f"them; use one of {', '.join(map(repr, _GRAPHS))}",
            field="cuda_graph_impl",
            value=config.cuda_graph_impl,
        )
    mtp = getattr(model, "mtp", None)
    if mtp is not None and not mtp.mtp_use_repeated_layer and len(mtp.layers) != config.mtp_num_layers:
        raise UnsupportedLayerError(
            f"mtp_num_layers is {config.mtp_num_layers}, and the layer pattern has {len(mtp.layers)} multi-token-"
            f"prediction depths; make them equal",
            field="mtp_num_layers",
            value=config.mtp_num_layers,
        )
