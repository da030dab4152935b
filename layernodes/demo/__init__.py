"""The demonstration: a Megatron-Core MoE model on real text, plainly and through the nodes, bit for bit."""
