"""Launches of what drafting on the device needs beside the decoder's own operations."""

import triton
from torch import Tensor

from kakeya.kernels.gpu import launches
from kakeya.kernels.gpu.device import drafts
from kakeya.kernels.gpu.interface import DraftTable, RowTable, SamplingTable

_COLUMNS = 1024
_CHOICE_BLOCK, _CHOICE_WARPS = 8192, 16


class TritonDrafts:
    """GpuDrafts in Triton."""

    def __init__(self, launch: dict[str, bool]) -> None:
        self._launch = launch

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
        count, n = state.shape
        drafts.draft_input[(count,)](
            table,
            token_ids,
            newest,
            rows.slabs,
            state if anchors is None else anchors,
            state,
            token_norm,
            state_norm,
            out,
            eps,
            N=n,
            BLOCK=launches.power_of_two(n),
            ANCHORED=anchors is not None,
            **self._launch,
        )

    def take_columns(self, hidden: Tensor, out: Tensor) -> None:
        count, n = hidden.shape
        grid = (count, triton.cdiv(n, _COLUMNS))
        drafts.take_columns[grid](hidden, out, out.stride(0), n, BLOCK=_COLUMNS, **self._launch)

    def keep_anchors(self, features: Tensor, picked: Tensor | None, slabs: Tensor, anchors: Tensor) -> None:
        n = features.shape[1]
        drafts.keep_anchors[(len(slabs),)](
            features,
            slabs if picked is None else picked,
            slabs,
            anchors,
            N=n,
            BLOCK=launches.power_of_two(n),
            PICKED=picked is not None,
            **self._launch,
        )

    def choose(
        self,
        logits: Tensor,
        draft_vocab: Tensor,
        rows: RowTable,
        sampling: SamplingTable,
        newest: Tensor,
        sampled: Tensor,
    ) -> None:
        drafts.choose_guess[(len(logits),)](
            logits,
            draft_vocab,
            rows.slabs,
            sampling.temperature,
            sampling.seed,
            sampling.positions,
            newest,
            sampled,
            logits.stride(0),
            logits.shape[1],
            BLOCK=_CHOICE_BLOCK,
            num_warps=_CHOICE_WARPS,
            **self._launch,
        )

    def judge(
        self,
        table: DraftTable,
        sampled: Tensor,
        newest: Tensor,
        features: Tensor,
        anchors: Tensor,
        runs: Tensor,
    ) -> None:
        sessions, n = len(runs), features.shape[1]
        drafts.judge_drafts[(sessions,)](
            table.token_ids,
            sampled,
            table.slabs,
            table.positions,
            table.sampling_positions,
            newest,
            features,
            anchors,
            runs,
            sessions,
            N=n,
            BLOCK=launches.power_of_two(n),
            COUNT=runs.shape[1] - 2,
            **self._launch,
        )
