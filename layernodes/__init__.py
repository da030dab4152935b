"""Transformer layers as typed nodes: hide expert-parallel communication behind computation, bit for bit."""
