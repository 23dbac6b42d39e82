"""What the front ends of one process have in common."""

from dataclasses import dataclass, field

from kakeya.serving.admission import Admission
from kakeya.serving.eviction import Eviction
from kakeya.serving.pace import Pace


@dataclass(frozen=True)
class Commons:
    """One each for a process: who may generate, how often streams are sent to, which sessions give way."""

    admission: Admission = field(default_factory=Admission)
    pace: Pace = field(default_factory=Pace)
    eviction: Eviction = field(default_factory=Eviction)
