"""The comparison harness: a plain ``GPTModel`` against the same model run through a schedule plan, bit for bit."""
