"""What the names of GGUF files say: the quant, and which part of a split model a file is.

A split model is `NAME-00001-of-00003.gguf` and so on. The quant is the last word of a name that is one:
`qwen3-4b-Q4_K_M.gguf`, `model.IQ4_XS.gguf`, `model-UD-Q4_K_XL-00001-of-00002.gguf`. Its case does not matter.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from kakeya.errors import ModelNotFound

SUFFIX = ".gguf"
# Which of several is taken by default: what most people run, its neighbours in size, then larger ones.
PREFERRED = (
    "Q4_K_M", "UD-Q4_K_XL", "Q4_K_S", "Q4_K_L", "IQ4_XS", "IQ4_NL", "Q4_1", "Q4_0", "Q4",
    "Q5_K_M", "Q5_K_S", "Q6_K", "Q8_0", "BF16", "F16", "F32",
)  # fmt: skip

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
_QUANT = re.compile(
    r"(?<![A-Z0-9])((?:UD-)?I?Q\d(?:_[A-Z0-9]+)*|TQ\d_\d|MXFP\d(?:_MOE)?|BF16|FP?16|FP?32)(?=$|[-.])",
    re.IGNORECASE,
)
# Files beside a model that are not models: projectors for pictures, and statistics for quantizers.
_COMPANIONS = ("mmproj", "imatrix")


@dataclass(frozen=True)
class PartName:
    """The name of one part of a split model; parts count from 1."""

    stem: str
    number: int
    count: int

    @property
    def siblings(self) -> tuple[str, ...]:
        """The names of all parts, in order, this one included."""
        return tuple(
            f"{self.stem}-{number:05}-of-{self.count:05}{SUFFIX}" for number in range(1, self.count + 1)
        )


@dataclass(frozen=True)
class GgufModel:
    """The files of one model: a single one, or the parts of a split one in order."""

    files: tuple[str, ...]
    missing: tuple[str, ...] = ()

    @property
    def first(self) -> str:
        """The file to name to a reader, which finds the others: the first that is there."""
        return next(file for file in self.files if file not in self.missing)

    @property
    def quant(self) -> str | None:
        return quant_of(self.first)


def part_name(name: str) -> PartName | None:
    """What a file name says of its part; None for the name of a whole model."""
    match = _PART.fullmatch(name)
    return PartName(match["stem"], int(match["number"]), int(match["count"])) if match else None


def canonical(tag: str) -> str:
    """A quant as we write it: `q4_k_m` is Q4_K_M, `fp16` is F16."""
    return tag.upper().replace("FP", "F") if tag.upper() in ("FP16", "FP32") else tag.upper()


def quant_of(name: str) -> str | None:
    """The quant that a file's name states, or the name of its folder."""
    path = PurePosixPath(name)
    part = part_name(path.name)
    stem = path.name.removesuffix(SUFFIX) if part is None else part.stem
    for words in (stem, path.parent.name):
        if found := _QUANT.findall(words):
            return canonical(found[-1])
    return None


def models_in(names: Iterable[str]) -> list[GgufModel]:
    """The models that these files make up, in the order of their names."""
    present = sorted(
        name
        for name in names
        if name.lower().endswith(SUFFIX) and not PurePosixPath(name).name.lower().startswith(_COMPANIONS)
    )
    models: dict[tuple[str, ...], GgufModel] = {}
    for name in present:
        part = part_name(name)
        files = (name,) if part is None else part.siblings
        models[files] = GgufModel(files, tuple(file for file in files if file not in present))
    return list(models.values())


def choose(models: Sequence[GgufModel], tag: str | None, where: str) -> GgufModel:
    """The model of that quant; without a tag the only one, or the first of PREFERRED that there is.

    Raises ModelNotFound, naming `where` and what there is, when there is none, several or a part missing.
    """
    found = matching(models, tag)
    if len(found) > 1:
        names = ", ".join(model.first for model in found)
        raise ModelNotFound(
            f"{where} has several files of {found[0].quant}; name one as {where}/FILE: {names}"
        )
    if not found:
        wanted = "none of the usual quants" if tag is None else f"no GGUF file of quant {canonical(tag)}"
        raise ModelNotFound(f"{where} has {wanted}; it has: {listed(models)}")
    if found[0].missing:
        raise ModelNotFound(f"{where} lacks parts of a split model: {', '.join(found[0].missing)}")
    return found[0]


def listed(models: Sequence[GgufModel]) -> str:
    """What there is, each by its quant, or by its file name where that says none."""
    return ", ".join(dict.fromkeys(model.quant or model.first for model in models)) or "none"


def matching(models: Sequence[GgufModel], tag: str | None) -> list[GgufModel]:
    """The models that `choose` chooses from: one, if all is well."""
    if tag is None and len(models) == 1:
        return list(models)
    for quant in PREFERRED if tag is None else (canonical(tag),):
        if found := [model for model in models if model.quant == quant]:
            return found
    return []
