"""The slot nodes."""
