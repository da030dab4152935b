"""The subcommands of ``layernodes``, one a file."""
