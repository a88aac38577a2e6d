"""What drafts for a call: the argument `draft`, and the settings of prompt lookup that `generate` has."""

from __future__ import annotations

from typing import Any

from spec_ops.decoding import Generator, PromptLookup, SpeculationConfig
from spec_ops.integrations.transformers.settings import GenerationSettings

PROMPT_LOOKUP = "prompt-lookup"


def named_draft(draft: Any) -> Any:
    """The draft that a name stands for; anything else as it is.

    Raises:
        ValueError: another name.
    """
    if not isinstance(draft, str):
        return draft
    if draft != PROMPT_LOOKUP:
        raise ValueError(
            f"TransformersGenerator: `draft` must be a model, a PromptLookup, '{PROMPT_LOOKUP}' or None, got {draft!r}"
        )
    return PromptLookup()


def draft_of_call(
    draft: Any, config: SpeculationConfig | None, settings: GenerationSettings
) -> tuple[Any, SpeculationConfig | None]:
    """What `speculative_generate` drafts with: its `draft` and `config`, or what `prompt_lookup_num_tokens` and
    `max_matching_ngram_size` of `generate` ask for.

    Raises:
        ValueError: naming the setting that contradicts an argument.
    """
    given, draft = draft, named_draft(draft)
    steps, ngram = settings.prompt_lookup_num_tokens, settings.max_matching_ngram_size
    if steps is None:
        if given == PROMPT_LOOKUP and ngram is not None:
            draft = PromptLookup(max_ngram=ngram)
        return draft, config
    if draft is not None and not isinstance(draft, PromptLookup):
        raise ValueError(_contradiction(steps, "`draft` is a model"))
    if config is not None and config.num_steps != steps:
        raise ValueError(_contradiction(steps, f"`config.num_steps` is {config.num_steps}"))
    if draft is None or given == PROMPT_LOOKUP:
        draft = PromptLookup() if ngram is None else PromptLookup(max_ngram=ngram)
    elif ngram not in (None, draft.max_ngram):
        raise ValueError(
            f"generate: `max_matching_ngram_size` must be None or {draft.max_ngram}, as `draft.max_ngram` is, got {ngram}"
        )
    return draft, config or SpeculationConfig(num_steps=steps)


def check_drafting(generator: Generator, settings: GenerationSettings) -> None:
    """Raise a ValueError if the settings of a call ask for another draft than the generator has."""
    draft, steps = generator.draft, settings.prompt_lookup_num_tokens
    if steps is None:
        return
    if not isinstance(draft, PromptLookup):
        raise ValueError(_contradiction(steps, "the generator was made with another `draft`"))
    draft_of_call(draft, generator.config, settings)


def _contradiction(steps: int, reason: str) -> str:
    return (
        f"generate: `prompt_lookup_num_tokens` must be None, got {steps}: {reason}. The draft of a generator is its own: "
        f"`draft={PROMPT_LOOKUP!r}, config=SpeculationConfig(num_steps={steps})`. If the model's generation_config sets it, "
        "`prompt_lookup_num_tokens=None` as an argument switches it off"
    )
