"""Decoding: the round as a module, and generation around it."""

from spec_ops.decoding.config import SpeculationConfig
from spec_ops.decoding.generate import GenerationResult, Generator, generate
from spec_ops.decoding.lookup import PromptLookup
from spec_ops.decoding.round import PlainRound, SpeculativeRound
from spec_ops.decoding.sampling import SamplingParams
from spec_ops.decoding.state import RoundState
from spec_ops.decoding.stats import GenerationStats

__all__ = [
    "GenerationResult",
    "GenerationStats",
    "Generator",
    "PlainRound",
    "PromptLookup",
    "RoundState",
    "SamplingParams",
    "SpeculationConfig",
    "SpeculativeRound",
    "generate",
]
