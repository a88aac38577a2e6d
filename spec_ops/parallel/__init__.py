"""Tensor parallelism: every rank holds a share of each layer, and one process per GPU runs the same rounds."""

from spec_ops.models.checkpoint import open_tensors
from spec_ops.parallel.group import RankError, TensorParallel
from spec_ops.parallel.loading import load_pair
from spec_ops.parallel.sharding import shard, shard_config

__all__ = ["RankError", "TensorParallel", "load_pair", "open_tensors", "shard", "shard_config"]
