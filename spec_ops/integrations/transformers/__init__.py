"""Hugging Face transformers (5.17 or newer): its models on paged KV, decoded speculatively in compiled rounds.

from spec_ops.integrations.transformers import SpecCache, speculative_generate

model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="spec_ops")
model.generate(**inputs, past_key_values=SpecCache(model, batch_size, max_seq_len))  # plain decoding
speculative_generate(model, draft, **inputs, max_new_tokens=256)                     # speculative decoding
"""

from spec_ops._extras import install_hint

try:
    import transformers as _transformers  # noqa: F401
except ImportError as error:
    raise ImportError(f"spec_ops.integrations.transformers needs transformers: {install_hint('transformers')}") from error

from spec_ops.integrations.transformers.attention import register
from spec_ops.integrations.transformers.cache import SpecCache
from spec_ops.integrations.transformers.eagle3 import load_eagle3
from spec_ops.integrations.transformers.fp8 import round_rows
from spec_ops.integrations.transformers.generate import SpeculativeOutput, TransformersGenerator, speculative_generate
from spec_ops.integrations.transformers.model import TransformersModel
from spec_ops.integrations.transformers.mtp import NextNDraft, load_mtp
from spec_ops.integrations.transformers.mxfp4 import read_mxfp4_as_stored
from spec_ops.integrations.transformers.stored import read_as_stored

register()

__all__ = [
    "NextNDraft",
    "SpecCache",
    "SpeculativeOutput",
    "TransformersGenerator",
    "TransformersModel",
    "load_eagle3",
    "load_mtp",
    "read_as_stored",
    "read_mxfp4_as_stored",
    "register",
    "round_rows",
    "speculative_generate",
]
