"""Opens the runtime a verb works with, showing the fetch when there is one."""

from typing import TYPE_CHECKING

from kakeya.cli.console import FetchBar, Screen
from kakeya.config import EngineConfig
from kakeya.garbage import uncollected

if TYPE_CHECKING:
    from kakeya.runtime import Runtime


def open_runtime(screen: Screen, model: str, config: EngineConfig) -> "Runtime":
    """Fetch the model if need be, then load it. Raises what resolving and loading raise."""
    from kakeya.models.catalogue import resolve

    with FetchBar(screen) as progress:
        resolve(model, progress, config)
    # Imported here because torch takes a second to import, and a missing model needs no torch.
    with uncollected():
        from kakeya.runtime import Runtime

        return Runtime.open(model, config)
