import pytest

from kakeya.errors import ModelNotFound
from kakeya.models.gguf_names import GgufModel, choose, listed, models_in, part_name, quant_of


@pytest.mark.parametrize(
    "name, quant",
    [
        ("qwen2.5-1.5b-instruct-q4_k_m.gguf", "Q4_K_M"),
        ("Qwen3-4B-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("model.i1-IQ4_XS.gguf", "IQ4_XS"),
        ("gemma-3-270m-it-Q8_0.gguf", "Q8_0"),
        ("Phi-3-mini-4k-instruct-q4.gguf", "Q4"),
        ("Phi-3-mini-4k-instruct-fp16.gguf", "F16"),
        ("gemma-3-1b-it-BF16.gguf", "BF16"),
        ("gpt-oss-MXFP4.gguf", "MXFP4"),
        ("llama-Q4_0_4_4.gguf", "Q4_0_4_4"),
        ("llama-q5_k_m-imat.gguf", "Q5_K_M"),
        ("qwen2.5-7b-instruct-q4_k_m-00001-of-00002.gguf", "Q4_K_M"),
        ("Q6_K/model-00001-of-00002.gguf", "Q6_K"),
        ("SmolLM2-135M-Instruct.gguf", None),
        ("iq-test-qwen3-7b.gguf", None),
    ],
)
def test_the_quant_that_a_name_states(name: str, quant: str | None) -> None:
    assert quant_of(name) == quant


def test_parts_know_their_siblings() -> None:
    part = part_name("deep/model-00002-of-00003.gguf")
    assert part is not None
    assert (part.number, part.count) == (2, 3)
    assert part.siblings == tuple(f"deep/model-0000{n}-of-00003.gguf" for n in (1, 2, 3))
    assert part_name("model-2-of-3.gguf") is None


def test_files_make_models() -> None:
    names = [
        "b-00002-of-00002.gguf",
        "b-00001-of-00002.gguf",
        "c-00002-of-00002.gguf",
        "a.gguf",
        "README.md",
        "mmproj-model-f16.gguf",
        "deep/imatrix.gguf",
    ]
    whole = ("b-00001-of-00002.gguf", "b-00002-of-00002.gguf")
    half = GgufModel(("c-00001-of-00002.gguf", "c-00002-of-00002.gguf"), ("c-00001-of-00002.gguf",))
    assert models_in(names) == [GgufModel(("a.gguf",)), GgufModel(whole), half]
    assert half.first == "c-00002-of-00002.gguf"


@pytest.mark.parametrize("tag", ["Q4_K_M", "q4_k_m"])
def test_a_tag_picks_its_quant_in_any_case(tag: str) -> None:
    models = models_in(["m-Q8_0.gguf", "m-q4_k_m.gguf", "m-UD-Q4_K_M.gguf"])
    assert choose(models, tag, "org/name").files == ("m-q4_k_m.gguf",)
    assert choose(models, "ud-q4_k_m", "org/name").files == ("m-UD-Q4_K_M.gguf",)


def test_float_tags_are_known_by_both_spellings() -> None:
    models = models_in(["m-fp16.gguf", "m-BF16.gguf"])
    assert choose(models, "F16", "x").files == choose(models, "fp16", "x").files == ("m-fp16.gguf",)
    assert choose(models, "bf16", "x").files == ("m-BF16.gguf",)


def test_without_a_tag_the_usual_one_is_taken() -> None:
    assert choose(models_in(["m-Q8_0.gguf", "m-Q4_K_M.gguf", "m-Q2_K.gguf"]), None, "x").quant == "Q4_K_M"
    assert choose(models_in(["m-Q8_0.gguf", "m-F16.gguf", "m-Q2_K.gguf"]), None, "x").quant == "Q8_0"
    assert choose(models_in(["m-Q2_K.gguf"]), None, "x").quant == "Q2_K"


@pytest.mark.parametrize(
    "names, tag, message",
    [
        (["m-Q8_0.gguf", "m-Q2_K.gguf"], "Q4_K_M", "x has no GGUF file of quant Q4_K_M; it has: Q2_K, Q8_0"),
        (["m-Q2_K.gguf", "odd.gguf"], None, "x has none of the usual quants; it has: Q2_K, odd.gguf"),
        (["a-Q8_0.gguf", "b-Q8_0.gguf"], None, "several files of Q8_0; name one as x/FILE: a-Q8_0.gguf, b"),
        (["m-Q8_0-00001-of-00002.gguf"], "q8_0", "lacks parts of a split model: m-Q8_0-00002-of-00002.gguf"),
        ([], "Q8_0", "it has: none"),
    ],
)
def test_what_cannot_be_chosen_is_listed(names: list[str], tag: str | None, message: str) -> None:
    with pytest.raises(ModelNotFound, match=message):
        choose(models_in(names), tag, "x")


def test_a_quant_of_several_files_is_listed_once() -> None:
    assert listed(models_in(["a-Q8_0.gguf", "b-Q8_0.gguf"])) == "Q8_0"
