"""Tiny random-weight models with a real tokenizer, for tests on a real llama-server.

They answer with random lower-case words and never end by themselves: give `max_tokens`, or a grammar that ends. An
answer's text becomes the same tokens again when it comes back in the next turn, so that a follow-up can re-use all of
the cache. At temperature 0 one state gives one answer; where cells lie otherwise in a unified cache (another slot),
flash attention sums in another order and now and then turns a word: compare across slots with `-fa off`.
`python -m tests.support.tiny_model` makes them and prints their paths.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import gguf
import numpy as np

from slotpin.llama.cache import cache_dir, locked, publish
from slotpin.llama.source import ensure_tree, find_source

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
IM_START, IM_END = 32000, 32001
CONTROL = int(gguf.TokenType.CONTROL)

# The weight of the bias against tokens that shall never be sampled.
BANNED = -200.0

# Standard deviation of the attention scores.
SHARPNESS = 8


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model. `window` 0: all layers have full attention; else every second one sees `window` tokens."""

    arch: str
    layers: int
    window: int = 0
    embd: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    ff: int = 256
    context: int = 131072


FULL = Shape(arch="llama", layers=2)
SLIDING = Shape(arch="gemma3", layers=4, window=64)


def full_attention() -> Path:
    """A Llama of two layers; context 131,072."""
    return tiny_model(FULL)


def sliding_window() -> Path:
    """A Gemma 3 of four layers, the first and third with a window of 64 tokens; context 131,072."""
    return tiny_model(SLIDING)


@cache
def tiny_model(shape: Shape) -> Path:
    """The model of that shape, made now if it is not in the cache."""
    generator = hashlib.sha256(Path(__file__).read_bytes() + repr(shape).encode()).hexdigest()[:16]
    folder = cache_dir() / "tiny-models" / f"{shape.arch}-{generator}"
    model = folder / f"tiny-{shape.arch}.gguf"
    if not model.is_file():
        vocabulary = ensure_tree(find_source(None), print) / "models" / "ggml-vocab-llama-spm.gguf"
        with locked("tiny-model", print):
            if not model.is_file():
                with publish(folder) as staging:
                    _write(staging / model.name, shape, vocabulary)
    return model


def _write(path: Path, shape: Shape, vocabulary: Path) -> None:
    writer = gguf.GGUFWriter(path, shape.arch)
    writer.add_name(f"tiny random {shape.arch}")
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.embd)
    writer.add_feed_forward_length(shape.ff)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    if shape.window:
        writer.add_sliding_window(shape.window)
        writer.add_sliding_window_pattern(2)
    tokens = _add_tokenizer(writer, vocabulary)
    _add_tensors(writer, shape, tokens)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: gguf.GGUFWriter, vocabulary: Path) -> list[str]:
    """Llama's own 32,000 tokens, and two for the chat template. Returns their texts."""
    reader = gguf.GGUFReader(vocabulary)

    def read(key: str) -> Any:
        field = reader.get_field(f"tokenizer.ggml.{key}")
        assert field is not None
        return field.contents()

    tokens = [*read("tokens"), "<|im_start|>", "<|im_end|>"]
    writer.add_tokenizer_model(read("model"))
    writer.add_tokenizer_pre(read("pre"))
    writer.add_token_list(tokens)
    writer.add_token_scores([*read("scores"), 0.0, 0.0])
    writer.add_token_types([*read("token_type"), CONTROL, CONTROL])
    writer.add_bos_token_id(read("bos_token_id"))
    writer.add_eos_token_id(read("eos_token_id"))
    writer.add_eot_token_id(IM_END)
    writer.add_unk_token_id(read("unknown_token_id"))
    writer.add_add_bos_token(True)
    writer.add_chat_template(CHAT_TEMPLATE)
    return tokens


def _add_tensors(writer: gguf.GGUFWriter, shape: Shape, tokens: list[str]) -> None:
    """Random weights, but for three things.

    Dimension 0 of the hidden state is 1 for every token and no layer writes to it: the output matrix uses it as a
    bias against unwanted tokens. Queries are long, so that attention picks few positions out of thousands and a
    wrong cell in the KV cache changes the answer. Output rows differ in length, so that the two best tokens are
    rarely as close as the rounding of flash attention, which depends on the cells' places.
    """
    random = np.random.default_rng(20261130)

    def matrix(outputs: int, inputs: int) -> Array:
        weights: Array = random.standard_normal((outputs, inputs)) / np.sqrt(inputs)
        return weights.astype(np.float16)

    def ones(n: int) -> Array:
        return np.ones(n, dtype=np.float32)

    def silent(n: int) -> Array:
        """Ones but for dimension 0."""
        return np.concatenate([np.zeros(1, dtype=np.float32), ones(n - 1)])

    gemma = shape.arch == "gemma3"
    embedding = random.standard_normal((len(tokens), shape.embd))
    embedding[:, 0] = 1.0
    output = random.standard_normal((len(tokens), shape.embd))
    output *= np.exp(0.3 * random.standard_normal((len(tokens), 1)))
    words = np.array([re.fullmatch("▁[a-z]{2,}", token) is not None for token in tokens])
    output[~words] = 0.0
    output[:, 0] = np.where(words, 0.0, BANNED)
    # Gemma multiplies what it looks up by the square root of the width.
    writer.add_tensor("token_embd.weight", (embedding / (np.sqrt(shape.embd) if gemma else 1.0)).astype(np.float16))
    writer.add_tensor("output_norm.weight", ones(shape.embd))
    writer.add_tensor("output.weight", output.astype(np.float16))
    for layer in range(shape.layers):
        attention_out = matrix(shape.embd, shape.heads * shape.head_dim)
        attention_out[0] = 0.0
        ffn_down = matrix(shape.embd, shape.ff)
        ffn_down[0] = 0.0
        query = matrix(shape.heads * shape.head_dim, shape.embd)
        weights: dict[str, Array] = {
            "attn_norm": ones(shape.embd),
            "attn_q": query if gemma else SHARPNESS * query,
            "attn_k": matrix(shape.kv_heads * shape.head_dim, shape.embd),
            "attn_v": matrix(shape.kv_heads * shape.head_dim, shape.embd),
            "attn_output": attention_out,
            "ffn_norm": ones(shape.embd),
            "ffn_gate": matrix(shape.ff, shape.embd),
            "ffn_up": matrix(shape.ff, shape.embd),
            "ffn_down": ffn_down,
        }
        if gemma:
            weights |= {
                "attn_q_norm": SHARPNESS * ones(shape.head_dim),
                "attn_k_norm": ones(shape.head_dim),
                "post_attention_norm": silent(shape.embd),
                "post_ffw_norm": silent(shape.embd),
            }
        for name, weight in weights.items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", weight)


if __name__ == "__main__":
    for path in (full_attention(), sliding_window()):
        print(path)
