"""Captured steps: one graph for each shape, so that a step costs the host one launch.

All graphs share one memory pool and the same buffers and tables; they run one after the other, on one stream.
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
    """Runs steps of known shapes: replayed where they are captured, launch by launch elsewhere.

    `run` must read and write static memory only, and never wait for the device.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._graphs: dict[StepShape, torch.cuda.CUDAGraph] = {}

    def __contains__(self, shape: StepShape) -> bool:
        return shape in self._graphs

    def capture(self, shapes: Sequence[StepShape]) -> None:
        """Capture every shape, the largest first, since the others then fit into its memory.

        The tables must be such that a step touches no slab: all rows padding.
        """
        began = time.monotonic()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        # Other threads may use the device meanwhile: only what this one does belongs to the graph.
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
        """For real: kernels are compiled and libraries set up before the capture, where they could not be."""
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._run(shape)
        torch.cuda.current_stream().wait_stream(stream)
