from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader, GGUFWriter

from tools.refengine import loader

HIDDEN, INTERMEDIATE, HEAD_DIM, VOCAB = 32, 48, 8, 8
TOKENS = ["<|end|>", "<|start|>", "a", "b", "c", "ab", "abc", "1"]


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    """A model file of one layer: four heads, two KV heads."""
    path = tmp_path / "tiny.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 1, 1, 1, 1, 1, 1])
    writer.add_token_merges(["a b", "ab c"])
    writer.add_eos_token_id(0)
    random = np.random.default_rng(0)
    shapes = {
        "token_embd": (VOCAB, HIDDEN),
        "output_norm": (HIDDEN,),
        "blk.0.attn_norm": (HIDDEN,),
        "blk.0.attn_q": (HIDDEN, HIDDEN),
        "blk.0.attn_k": (2 * HEAD_DIM, HIDDEN),
        "blk.0.attn_v": (2 * HEAD_DIM, HIDDEN),
        "blk.0.attn_output": (HIDDEN, HIDDEN),
        "blk.0.ffn_norm": (HIDDEN,),
        "blk.0.ffn_gate": (INTERMEDIATE, HIDDEN),
        "blk.0.ffn_up": (INTERMEDIATE, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, INTERMEDIATE),
    }
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", random.standard_normal(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_config_weights_and_tokenizer_come_from_the_file(gguf: Path, tmp_path: Path) -> None:
    checkpoint = loader.load(gguf, tmp_path / "cache")
    config = checkpoint.config
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.end_token) == (1, 4, 2, 0)
    raw = {tensor.name: torch.tensor(tensor.data) for tensor in GGUFReader(gguf).tensors}
    assert torch.equal(checkpoint.weights["embedding"], raw["token_embd.weight"])
    pieces = {name: weight[1] for name, weight in checkpoint.weights.items() if weight.dim() == 3}  # second KV head
    assert torch.equal(pieces["0.query"], raw["blk.0.attn_q.weight"][2 * HEAD_DIM :])
    assert torch.equal(pieces["0.kv"][:HEAD_DIM], raw["blk.0.attn_k.weight"][HEAD_DIM:])
    assert torch.equal(pieces["0.kv"][HEAD_DIM:], raw["blk.0.attn_v.weight"][HEAD_DIM:])
    assert torch.equal(pieces["0.attention_out"], raw["blk.0.attn_output.weight"][:, 2 * HEAD_DIM :])
    assert torch.equal(pieces["0.gate_up"][: INTERMEDIATE // 2], raw["blk.0.ffn_gate.weight"][INTERMEDIATE // 2 :])
    assert torch.equal(pieces["0.gate_up"][INTERMEDIATE // 2 :], raw["blk.0.ffn_up.weight"][INTERMEDIATE // 2 :])
    assert torch.equal(pieces["0.down"], raw["blk.0.ffn_down.weight"][:, INTERMEDIATE // 2 :])
    assert all(weight.is_contiguous() for weight in checkpoint.weights.values())
    assert checkpoint.tokenizer.encode("<|start|>abcab").ids == [1, 6, 5]
    assert checkpoint.tokenizer.decode([6, 5]) == "abcab"


def test_the_second_load_maps_the_converted_file(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = loader.load(gguf, tmp_path / "cache")
    monkeypatch.setattr(loader, "convert", None)
    second = loader.load(gguf, tmp_path / "cache")
    assert second.config == first.config
    assert all(torch.equal(second.weights[name], weight) for name, weight in first.weights.items())
    (converted,) = (tmp_path / "cache").iterdir()
    assert first.fingerprint in converted.name


def test_a_failed_conversion_leaves_no_file(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def disk_full(content: object, path: str) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(torch, "save", disk_full)
    with pytest.raises(OSError, match="no space"):
        loader.load(gguf, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_missing_wheel_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="tools/setup --demo"):
        loader.find_gguf()
