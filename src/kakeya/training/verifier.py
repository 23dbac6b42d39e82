"""The parts of the verifier that a drafter shares: the embedding, the head, and how positions turn."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from kakeya.models.checkpoint import Checkpoint
from kakeya.models.config import ModelConfig
from kakeya.models.drafter import drafter_rope
from kakeya.models.rope import rope_tables
from kakeya.models.tensors import ModelTensors, StoredMatrix, as_float


@dataclass(frozen=True)
class SharedParts:
    """Embedding and head of a verifier on the training's device, in its element type. They do not change.

    Of the head a drafter has the rows of the tokens that it can guess. *Places* are those in its draft
    vocabulary.
    """

    model: ModelConfig
    embedding: Tensor  # [vocab, n]
    head: Tensor  # [draft vocab, n]
    final_norm: Tensor  # float32 [n]; the scale of the logits is in it
    draft_vocab: Tensor  # int64 [draft vocab]: the id at each place, ascending

    @classmethod
    def of(cls, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> "SharedParts":
        tensors = ModelTensors(checkpoint)

        def moved(stored: StoredMatrix) -> Tensor:
            return torch.cat([as_float(part, dtype) for part in stored.parts]).to(device)

        embedding, untied = moved(tensors.embedding()), tensors.untied_head()
        head = embedding if untied is None else moved(untied)
        final_norm = tensors.final_norm().to(device)
        checkpoint.release()
        return cls(checkpoint.config, embedding, head, final_norm, torch.arange(len(head), device=device))

    def guessing(self, draft_vocab: Tensor) -> "SharedParts":
        """The same for a drafter that can guess these ids alone."""
        ids = draft_vocab.to(self.head.device)
        return replace(self, head=self.head[ids], draft_vocab=ids)

    @cached_property
    def places(self) -> Tensor:
        """int64 [vocab]: the place of each id, -1 of those that are not guessed."""
        places = torch.full((len(self.embedding),), -1, device=self.head.device)
        places[self.draft_vocab] = torch.arange(len(self.draft_vocab), device=self.head.device)
        return places

    def embed(self, tokens: Tensor) -> Tensor:
        """float32 [..., n]"""
        return functional.embedding(tokens, self.embedding).float() * self.model.embed_scale

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., draft vocab] in the element type, for normed hidden states, which carry the logits' scale."""
        logits = functional.linear(hidden.to(self.head.dtype), self.head)
        cap = self.model.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def last_normed(self, output: Tensor) -> Tensor:
        """The outputs of the last layer as the head sees them."""
        return functional.rms_norm(output, self.final_norm.shape, self.final_norm, self.model.norm_eps)


def rotation_tables(model: ModelConfig, positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin for each position from 0 on, [positions, head_dim / 2]."""
    cos, sin = rope_tables(model.layer_ropes[drafter_rope(model)].within(positions), range(positions))
    return cos.to(device), sin.to(device)
