"""The demonstration: a Megatron-Core MoE model on real text, run plainly and through the nodes, compared bit for bit."""
