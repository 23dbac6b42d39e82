"""What drafting on the device needs beside the decoder's own operations, in plain torch."""

import torch
from torch import Tensor
from torch.nn import functional

from kakeya.kernels.gpu import philox, torch_attention
from kakeya.kernels.gpu.interface import DraftTable, RowTable, SamplingTable


class TorchDrafts:
    """GpuDrafts in torch, on any device."""

    def input(
        self,
        table: Tensor,
        token_ids: Tensor,
        newest: Tensor,
        rows: RowTable,
        anchors: Tensor | None,
        state: Tensor,
        token_norm: Tensor,
        state_norm: Tensor,
        eps: float,
        out: Tensor,
    ) -> None:
        slabs = rows.slabs.clamp(min=0)
        if anchors is not None:
            state.copy_(anchors.index_select(0, slabs))
        tokens = torch.where(token_ids >= 0, token_ids, newest.index_select(0, slabs))
        embedding = functional.embedding(tokens, table).float()
        n = state.shape[1]
        out[:, :n].copy_(torch_attention.normed(embedding, token_norm, eps))
        out[:, n:].copy_(torch_attention.normed(state, state_norm, eps))

    def take_columns(self, hidden: Tensor, out: Tensor) -> None:
        out.copy_(hidden)

    def keep_anchors(self, features: Tensor, picked: Tensor | None, slabs: Tensor, anchors: Tensor) -> None:
        rows = features if picked is None else features.index_select(0, picked)
        torch_attention.put_real(anchors, (slabs,), rows, slabs >= 0)

    def choose(
        self,
        logits: Tensor,
        draft_vocab: Tensor,
        rows: RowTable,
        sampling: SamplingTable,
        newest: Tensor,
        sampled: Tensor,
    ) -> None:
        is_warm = sampling.temperature > 0
        scores = (logits - logits.amax(1, keepdim=True)) / torch.where(is_warm, sampling.temperature, 1.0)[
            :, None
        ]
        running = scores.exp().cumsum(1)
        target = philox.uniform(sampling.seed, sampling.positions).float() * running[:, -1]
        drawn = (running <= target[:, None]).sum(1).clamp(max=logits.shape[1] - 1)
        guesses = draft_vocab[torch.where(is_warm, drawn, logits.argmax(1))]
        real = rows.slabs >= 0
        sampled.copy_(torch.where(real, guesses, sampled))
        torch_attention.put_real(newest, (rows.slabs,), guesses, real)

    def judge(
        self,
        table: DraftTable,
        sampled: Tensor,
        newest: Tensor,
        features: Tensor,
        anchors: Tensor,
        runs: Tensor,
    ) -> None:
        sessions, count = len(runs), runs.shape[1] - 2
        guesses, chosen = table.token_ids.view(-1, sessions)[1:], sampled.view(-1, sessions)
        kept = (guesses == chosen[:count]).int().cumprod(0).sum(0, dtype=torch.int32)
        real, session = table.slabs[:sessions] >= 0, torch.arange(sessions, device=runs.device)
        runs[:, 0] = torch.where(real, kept + 1, runs[:, 0])
        runs[:, 1:] = torch.where(real[:, None], chosen.T, runs[:, 1:])
        places = torch.arange(count + 1, dtype=torch.int32, device=runs.device)[:, None]
        positions = (table.positions[:sessions] + kept + 1)[None, :] + places
        table.positions.copy_(positions.flatten())
        table.sampling_positions.copy_((positions + 1).flatten())
        table.token_ids[:sessions] = -1
        slabs, newest_rows = table.slabs[:sessions], kept.long() * sessions + session
        torch_attention.put_real(newest, (slabs,), sampled[newest_rows].clamp(min=0), real)
        torch_attention.put_real(anchors, (slabs,), features[newest_rows], real)
