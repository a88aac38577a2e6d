"""Plain, readable PyTorch for every op: it defines correctness.

No host sync, no data-dependent shape: these run under CUDA graphs too. On CPU, where it costs nothing, values inside index
tensors are checked as well, so that a bad slot or page id raises instead of corrupting a cache.
"""
