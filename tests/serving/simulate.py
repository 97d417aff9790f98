"""What a draft should do in a server, from speculators' own module. Training side.

Greedy speculation accepts exactly the drafts that equal the target's own greedy
tokens. So the target's greedy continuation is computed once per prompt, and a
draft is asked, for every position at which a round may start, how many of its
tokens are right.

One call of ``Eagle3DraftModel.forward`` answers that for all positions at once.
Row j of its step k attends to the prefix up to j, made of the target's features,
and to the k tokens of its own chain: the keys that a server has when a round
starts at j. The chain is fed the target's tokens instead of the draft's own, which
makes no difference to the count: draft k counts only if all drafts before it were
right, and then they are the target's tokens. ``propose`` feeds a draft's own tokens
back, one round at a time, and a test shows that both agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

STEPS = 3  # draft tokens per round; the trained unroll
NEW_TOKENS = 32


@dataclass(frozen=True)
class Continuation:
    """A prompt with the target's greedy continuation.

    Attributes:
        prompt: Number of prompt tokens.
        tokens: [n], prompt and continuation; ``STEPS`` tokens more than
            ``NEW_TOKENS``, since the last round may look that far.
        hidden: [layers, n, hidden], input of every decoder layer.
        last: [n, hidden], output of the last layer before the final norm.
    """

    prompt: int
    tokens: Tensor
    hidden: Tensor
    last: Tensor

    def features(self, layer_ids: list[int]) -> Tensor:
        """[n, len(layer_ids) * hidden]: speculators' id k is the input of layer k."""
        return torch.cat([self.hidden[k] for k in sorted(layer_ids)], -1)

    @property
    def new_tokens(self) -> list[int]:
        """The ``NEW_TOKENS`` ids that any correct server returns."""
        return self.tokens[self.prompt : self.prompt + NEW_TOKENS].tolist()


@dataclass(frozen=True)
class Rounds:
    """Verification rounds of one prompt; entry i: drafts accepted in round i."""

    accepted: list[int]

    @property
    def histogram(self) -> list[int]:
        """How many rounds accepted 0, 1, ... drafts; as long as needed."""
        longest = max(self.accepted)
        return [self.accepted.count(n) for n in range(longest + 1)]


def accept_length(rounds: list[Rounds]) -> float:
    """Mean tokens per round over all prompts, the bonus token counted."""
    accepted = [n for prompt in rounds for n in prompt.accepted]
    return 1 + sum(accepted) / len(accepted)


def same_histograms(served: list[dict[str, Any]], rounds: list[Rounds]) -> list[bool]:
    """Per prompt, whether the engine accepted as many drafts in as many rounds."""
    return [
        answer["histogram"] == expected.histogram
        for answer, expected in zip(served, rounds, strict=True)
    ]


def load_target(folder: Path) -> PreTrainedModel:
    """The target in fp32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def load_draft(checkpoint: Path) -> Eagle3DraftModel:
    """A speculators checkpoint as speculators' own class, in fp32.

    Raises:
        ValueError: if the checkpoint has no embedding; the class leaves zeros then.
    """
    config = Eagle3SpeculatorConfig.from_pretrained(checkpoint)
    config.transformer_layer_config._attn_implementation = "eager"
    draft = Eagle3DraftModel.from_pretrained(
        checkpoint, config=config, dtype=torch.float32
    )
    if not draft.embed_tokens.weight.any():
        raise ValueError(f"{checkpoint} holds no embed_tokens.weight")
    return draft.eval()


@torch.no_grad()
def continue_greedily(target: PreTrainedModel, prompt: list[int]) -> Continuation:
    """Continue a prompt with the target alone."""
    tokens = torch.tensor([prompt])
    for _ in range(NEW_TOKENS + STEPS):
        best = target(tokens).logits[:, -1:].argmax(-1)
        tokens = torch.cat([tokens, best], 1)
    last: list[Tensor] = []
    hook = target.model.norm.register_forward_pre_hook(lambda _, x: last.append(x[0]))
    output = target(tokens, output_hidden_states=True)
    hook.remove()
    return Continuation(
        prompt=len(prompt),
        tokens=tokens[0],
        hidden=torch.stack(output.hidden_states[:-1])[:, 0],
        last=last[0][0],
    )


def pack(draft: Eagle3DraftModel, texts: list[Continuation]) -> dict[str, Tensor]:
    """Inputs of the module's forward: all texts behind each other in one row.

    Row entry j of a text pairs token j + 1 with the target's feature of token j, as
    speculators' data loader does.
    """
    lengths = [len(text.tokens) - 1 for text in texts]
    features = [text.features(draft.target_layer_ids)[:-1] for text in texts]
    documents = [torch.full((n,), i) for i, n in enumerate(lengths)]
    packed = {
        "hidden_states": torch.cat(features),
        "input_ids": torch.cat([text.tokens[1:] for text in texts]),
        "document_ids": torch.cat(documents),
        "position_ids": torch.cat([torch.arange(1, n + 1) for n in lengths]),
    }
    return {name: tensor[None] for name, tensor in packed.items()}


@torch.no_grad()
def right_drafts(draft: Eagle3DraftModel, texts: list[Continuation]) -> list[list[int]]:
    """Right drafts in a row for a round that starts behind each token of each text.

    Returns:
        Entry [i][n]: drafts accepted when token n of text i is the newest one; entry
        [i][0] is unused. A start needs ``STEPS`` tokens behind it to compare with.
    """
    steps = draft(**pack(draft, texts), ttt_steps=STEPS)
    right, row = [], 0
    for text in texts:
        starts = len(text.tokens) - STEPS
        count = torch.zeros(starts, dtype=torch.long)
        alive = torch.ones(starts - 1, dtype=torch.bool)
        for k, drafted in enumerate(steps):
            ids = target_ids(draft, drafted[0, row : row + starts - 1])
            alive &= ids == text.tokens[2 + k :][: starts - 1]
            count[1:] += alive
        right.append(count.tolist())
        row += len(text.tokens) - 1
    return right


@torch.no_grad()
def propose(draft: Eagle3DraftModel, text: Continuation, newest: int) -> list[int]:
    """The draft's own chain when token ``newest`` is the newest one (target ids)."""
    features = text.features(draft.target_layer_ids)[:newest]
    committed = text.tokens[1 : newest + 1]
    chain: list[int] = []
    for k in range(STEPS):
        # Rows behind the last committed one are only there to be shifted in.
        ids = torch.cat([committed, torch.tensor(chain, dtype=torch.long)])
        rows = torch.cat([features, features.new_zeros(k, features.shape[1])])
        documents = torch.zeros(1, len(ids), dtype=torch.long)
        steps = draft(rows[None], ids[None], documents, ttt_steps=k + 1)
        chain.append(int(target_ids(draft, steps[k][0, newest - 1])))
    return chain


def target_ids(draft: Eagle3DraftModel, drafted: Tensor) -> Tensor:
    """Ids of the draft vocabulary as ids of the target's."""
    return drafted if draft.d2t is None else drafted + draft.d2t[drafted]


def simulate(draft: Eagle3DraftModel, texts: list[Continuation]) -> list[Rounds]:
    """The rounds of each text, as a server with ``STEPS`` chained drafts has them."""
    starts = right_drafts(draft, texts)
    return [rounds_of(*pair) for pair in zip(starts, texts, strict=True)]


def oracle(draft: Eagle3DraftModel, texts: list[Continuation]) -> list[Rounds]:
    """The rounds of a draft that is right wherever its vocabulary allows it."""
    known = torch.ones(draft.verifier_vocab_size, dtype=torch.bool)
    if draft.t2d is not None:
        known = draft.t2d.bool()
    rounds = []
    for text in texts:
        inside = known[text.tokens].tolist()
        right = [
            [*inside[start + 1 : start + 1 + STEPS], False].index(False)
            for start in range(len(text.tokens) - STEPS)
        ]
        rounds.append(rounds_of(right, text))
    return rounds


def rounds_of(right: list[int], text: Continuation) -> Rounds:
    """Walk from round to round; the prompt's pass has given the first new token."""
    accepted = []
    newest, end = text.prompt, text.prompt + NEW_TOKENS - 1
    while newest < end:
        accepted.append(right[newest])
        newest += right[newest] + 1
    return Rounds(accepted)
