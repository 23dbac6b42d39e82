"""Captured steps: one CUDA graph for each bucket, so that a step costs the host one launch.

All graphs share one memory pool and the same buffers and tables. They run one after the other, on one stream.
"""

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from kakeya.engine.cuda.shapes import StepShape

log = logging.getLogger(__name__)

Run = Callable[[StepShape], None]


class StepGraphs:
    """Runs steps of known shapes: replays the graph where there is one, otherwise runs launch by launch.

    `run` must read and write static memory only, and must never wait for the device.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._graphs: dict[StepShape, torch.cuda.CUDAGraph] = {}

    def __contains__(self, shape: StepShape) -> bool:
        return shape in self._graphs

    def capture(self, shapes: Sequence[StepShape]) -> None:
        """Capture every shape, the largest first, so that the others fit into its memory.

        All rows in the tables must be padding, so that the step touches no slab.
        """
        began = time.monotonic()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        # Other threads may use the device at the same time: only this thread's work belongs to the graph.
        recording = partial(
            torch.cuda.graph,
            pool=torch.cuda.graph_pool_handle(),
            stream=stream,
            capture_error_mode="thread_local",
        )
        for shape in sorted(shapes, key=lambda shape: shape.rows, reverse=True):
            self._run_once(shape, stream)
            graph = torch.cuda.CUDAGraph()
            with recording(graph):
                self._run(shape)
            self._graphs[shape] = graph
        torch.cuda.synchronize()
        log.info("captured %d graphs in %.1f s", len(shapes), time.monotonic() - began)

    def run(self, shape: StepShape) -> None:
        graph = self._graphs.get(shape)
        if graph is None:
            self._run(shape)
        else:
            graph.replay()

    def _run_once(self, shape: StepShape, stream: torch.cuda.Stream) -> None:
        """Run without a capture: kernels are compiled and libraries set up, which is not possible during
        one."""
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._run(shape)
        torch.cuda.current_stream().wait_stream(stream)
