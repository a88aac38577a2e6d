"""Reference targets and drafts that call the ops, all with paged KV."""

from spec_ops.models.checkpoint import CheckpointError, CheckpointNotFoundError
from spec_ops.models.config import MixtureConfig, ModelConfig, ModelSizes
from spec_ops.models.drafts import Draft, Eagle3Draft, MTPDraft, StandaloneDraft
from spec_ops.models.huggingface import export_pair
from spec_ops.models.paged import PagedAttention, PagedKVCache
from spec_ops.models.pretrained import load_pair, save_pair
from spec_ops.models.quantized import quantize
from spec_ops.models.target import CausalLM, PositionLimit, Target, TargetOutput

__all__ = [
    "CausalLM",
    "CheckpointError",
    "CheckpointNotFoundError",
    "Draft",
    "Eagle3Draft",
    "MTPDraft",
    "MixtureConfig",
    "ModelConfig",
    "ModelSizes",
    "PagedAttention",
    "PagedKVCache",
    "PositionLimit",
    "StandaloneDraft",
    "Target",
    "TargetOutput",
    "export_pair",
    "load_pair",
    "quantize",
    "save_pair",
]
