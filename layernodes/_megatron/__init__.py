"""The adapter: the only place, with ``layernodes.cpu``, that uses private names of Megatron-Core."""
