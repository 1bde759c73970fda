"""The default model's conversion against outside knowledge of it, and the cache around it."""

from __future__ import annotations

import json
import shutil
import stat
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from pdserve import model_store, smollm2

# The pre-tokenizer that generic converters write: without the splitting of digits.
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


@pytest.fixture(scope="module")
def model() -> Path:
    return model_store.prepare_default_model()


def test_the_checked_directory_passes_its_own_check(model: Path) -> None:
    smollm2.check(model)


@pytest.mark.parametrize("text", ["2024", "a1b22c333", "\t\t1", "  7", "\n\n42", "x=3.14159", "1,000,000"])
def test_every_digit_is_a_token_of_its_own(model: Path, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    pieces = [tokenizer.decode([i]) for i in tokenizer(text)["input_ids"]]
    assert "".join(pieces) == text
    digits = [piece for piece in pieces if any(c.isdigit() for c in piece)]
    assert digits == [c for c in text if c.isdigit()]


def test_transformers_reads_the_directory_as_meant(model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert tokenizer.model_max_length == 8192
    assert (tokenizer.eos_token, tokenizer.bos_token, tokenizer.pad_token) == (
        "<|im_end|>",
        "<|im_start|>",
        "<|im_end|>",
    )
    assert tokenizer("hi")["input_ids"] == tokenizer("hi", add_special_tokens=False)["input_ids"]
    assert tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    ) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    config = LlamaConfig.from_pretrained(model)
    assert config.rope_parameters["rope_theta"] == 100_000.0
    assert config.rms_norm_eps == 1e-5
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (30, 9, 3)
    assert config.tie_word_embeddings


def test_files_can_be_read_by_everyone(model: Path) -> None:
    for path in [model, *model.iterdir()]:
        assert stat.S_IMODE(path.stat().st_mode) & 0o044 == 0o044, path


def test_weights_are_finite_bfloat16(model: Path) -> None:
    weights = load_file(model / smollm2.WEIGHTS_FILE_NAME)
    assert "lm_head.weight" not in weights
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert all(bool(torch.isfinite(weight).all()) for weight in weights.values())


def test_it_answers_sensibly_and_stops_by_itself(model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    llama = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.inference_mode():
        output = llama.generate(**inputs, max_new_tokens=64, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(output)
    assert output[-1] == tokenizer.eos_token_id


def test_rotary_rows_return_to_halves_order() -> None:
    head_dim, heads = 6, 2
    rows = torch.arange(heads * head_dim).reshape(-1, 1)
    gguf_order = torch.tensor([0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]).reshape(-1, 1)
    assert torch.equal(smollm2._undo_rotary_interleave(gguf_order, head_dim), rows)


@pytest.mark.parametrize(
    ("file", "change", "named"),
    [
        ("config.json", {"rope_theta": 10_000.0}, "rope_theta"),
        ("config.json", {"rms_norm_eps": 9.999999747e-06}, "rms_norm_eps"),
        ("tokenizer_config.json", {"model_max_length": 10**30}, "model_max_length"),
        ("tokenizer_config.json", {"tokenizer_class": "TokenizersBackend"}, "tokenizer_class"),
        ("tokenizer_config.json", {"chat_template": ""}, "chat template"),
        ("generation_config.json", {"eos_token_id": 0}, "eos_token_id"),
        ("tokenizer.json", {"pre_tokenizer": BYTE_LEVEL}, "token ids"),
    ],
)
def test_check_names_each_flaw(model: Path, tmp_path: Path, file: str, change: dict[str, object], named: str) -> None:
    for path in model.iterdir():
        (tmp_path / path.name).symlink_to(path)
    content = {**json.loads((model / file).read_text()), **change}
    (tmp_path / file).unlink()
    (tmp_path / file).write_text(json.dumps(content))
    with pytest.raises(smollm2.ConversionError, match=named):
        smollm2.check(tmp_path)


def stub_conversion(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """Replace the conversion by one that writes a file; the directories it was called with."""
    calls: list[Path] = []

    def convert(gguf_file: Path, out: Path, on_progress: object) -> None:
        calls.append(out)
        (out / "config.json").write_text("{}")

    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path))
    monkeypatch.setattr(smollm2, "find_gguf", lambda: tmp_path)
    monkeypatch.setattr(smollm2, "convert", convert)
    monkeypatch.setattr(smollm2, "check", lambda directory: None)
    return calls


def test_two_at_once_convert_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = stub_conversion(monkeypatch, tmp_path)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(model_store.prepare_default_model())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(calls) == 1
    assert len(found) == 4
    assert len(set(found)) == 1


def test_a_failed_conversion_leaves_nothing_and_a_killed_one_is_swept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stub_conversion(monkeypatch, tmp_path)

    def failing_check(directory: Path) -> None:
        raise smollm2.ConversionError("wrong")

    monkeypatch.setattr(smollm2, "check", failing_check)
    with pytest.raises(model_store.ModelUnavailableError, match="wrong"):
        model_store.prepare_default_model()
    models = tmp_path / "models"
    assert [path for path in models.iterdir() if path.is_dir()] == []

    leftover = models / f".{model_store._DEFAULT_MODEL_DIRECTORY}-tmp-killed"
    leftover.mkdir()
    monkeypatch.setattr(smollm2, "check", lambda directory: None)
    model_store.prepare_default_model()
    assert not leftover.exists()


def test_an_unwritable_cache_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path / "file"))
    with pytest.raises(model_store.ModelUnavailableError, match=r"cannot be written .*PDSERVE_CACHE") as caught:
        model_store.prepare_default_model()
    assert "\n" not in str(caught.value)


def test_a_full_disk_is_said_before_converting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = stub_conversion(monkeypatch, tmp_path)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1 << 20))
    with pytest.raises(model_store.ModelUnavailableError, match="1 MiB free"):
        model_store.prepare_default_model()
    assert calls == []


def test_what_a_model_name_may_be(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stub_conversion(monkeypatch, tmp_path / "cache")
    default = model_store.resolve_model(None)
    assert model_store.resolve_model("SmolLM2-135M-Instruct") == default == model_store.default_model_path()
    (tmp_path / "config.json").write_text("{}")
    assert model_store.resolve_model(str(tmp_path)) == tmp_path
    (tmp_path / "empty").mkdir()
    with pytest.raises(model_store.ModelUnavailableError, match=r"no config\.json"):
        model_store.resolve_model(str(tmp_path / "empty"))
    with pytest.raises(model_store.ModelUnavailableError, match="neither a directory"):
        model_store.resolve_model("no-such-model")


def test_an_unreachable_hub_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(name: str, allow_patterns: list[str]) -> str:
        raise OSError("name resolution failed\nmore lines")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    with pytest.raises(
        model_store.ModelUnavailableError, match=r"org/name cannot be had .*name resolution failed\)"
    ) as caught:
        model_store.resolve_model("org/name")
    assert "\n" not in str(caught.value)
