"""The API reference is made from the sources, and says so when it is stale."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def api_docs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("api_docs", ROOT / "scripts/api_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_rpc_field_and_method_is_there(api_docs: ModuleType) -> None:
    page = api_docs.page()
    assert "| `Generate` | `GenerateRequest → stream GenerateEvent` | Generate tokens" in page
    assert "| `logit_bias` | `map<uint32, float>` | 13 | Added to the logits of these tokens. |" in page
    assert "| `EOS` | 2 | An EOS token was generated; it was sent and is kept. |" in page
    assert "append(token_ids: Iterable[int], expected_history_length: int | None=None) -> int" in page
    assert "- `seed: int` Decides the randomness, together with each token's position." in page
    assert "├── Unauthenticated" in page
    assert "| `Propose` | `stream ProposeRequest → stream ProposeResponse` | One stream" in page


def test_a_stale_page_fails_the_check(
    api_docs: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(api_docs, "PAGE", tmp_path / "api.md")
    assert api_docs.main(["--check"]) == 1
    assert "make docs" in capsys.readouterr().err
    assert api_docs.main([]) == 0
    assert api_docs.main(["--check"]) == 0
    (tmp_path / "api.md").write_text("old")
    assert api_docs.main(["--check"]) == 1
