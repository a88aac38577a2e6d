"""`python -m benchmarks invariance`: texts and logits with `invariant=True`, and its price."""
