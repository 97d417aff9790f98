"""Mutants that cannot change any logit, in every family: patterns and reasons."""

from __future__ import annotations

DEFAULT = "what is written is the default of an absent key, in every release judged"
UNREAD = "no forward reads it"
CONTEXT = (
    "SGLang holds it against the context, and refuses to start, and sizes a table; "
    "the RoPE keys have their own original length"
)
SPEED = "it sets how many tokens are drafted and checked, not what a draft computes"
DEMANDS = "it only demands a newer release than is needed"
INFORMS = "it only says something; what is written stays the same"
NEVER = "speculators does not make such a draft, and its tensors contradict it too"
DESCRIBES = "a check of what the source holds; a source that has it right is written"
THERE = "SGLang puts the target's there, whatever is said of it"

# Mutants of a launch line.
LAUNCH = {
    r"--speculative-(num-steps|eagle-topk|num-draft-tokens): off by one": SPEED,
}
# Mutants of rules.
COMMON = {
    r"tensors: .*: optional": DESCRIBES
    + "; an absent one leaves its parameter without origin, an error",
    r"tensors: (embed_tokens|lm_head)\.weight: fate dropped": THERE,
    r"parameters: embed_tokens\.weight: .*": f"{THERE}; the rule lists it in the "
    "manifest",
    r"variables: (T|T1): .*": SPEED,
    r"flags: \['--speculative-draft-model-quantization', 'unquant'\]: when true": (
        "the draft is not quantised anyway"
    ),
}
# The same where the head is the target's.
HEAD = {
    r"parameters: lm_head\.weight: .*": COMMON[r"parameters: embed_tokens\.weight: .*"],
}
# The same of the templates that say how many steps.
STEPS = {
    r"serves: --speculative-(num-steps|eagle-topk|num-draft-tokens) other": SPEED,
}
