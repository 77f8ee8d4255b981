"""A small Llama of torch alone, with the names and the configuration of transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class LlamaConfig:
    """The configuration, as far as a layout asks for it."""

    model_type = "llama"

    def __init__(self, **changes: Any) -> None:
        self.values = {
            "model_type": "llama", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "rms_norm_eps": 1e-5,
            "rope_theta": 10000, "tie_word_embeddings": False,
        } | changes  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        return self.values

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["values"][name]
        except KeyError:
            raise AttributeError(name) from None


def _rotated(x: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotate the halves of heads, [batch, head, place, dim], by their places."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[-2])[:, None] * theta ** -(torch.arange(half) / half)
    first, second = x.chunk(2, -1)
    turned = (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin())
    return torch.cat(turned, -1)


class _Attention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self._config, size, width = config, config.head_dim, config.hidden_size
        self.q_proj = nn.Linear(width, config.num_attention_heads * size, bias=False)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * size, bias=False)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * size, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * size, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            f(x).unflatten(-1, (-1, self._config.head_dim)).transpose(1, 2)
            for f in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = (_rotated(part, self._config.rope_theta) for part in (q, k))
        k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], 1) for part in (k, v))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        projected: torch.Tensor = self.o_proj(found.transpose(1, 2).flatten(2))
        return projected


class _MLP(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        projected: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return projected


class _Block(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn, self.mlp = _Attention(config), _MLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        found: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return found


class _Decoder(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(_Block(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(x)
        for layer in self.layers:
            x = layer(x)
        found: torch.Tensor = self.norm(x)
        return found


class Llama(nn.Module):
    """The model with its head."""

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        self.config = LlamaConfig(**changes)
        self.model = _Decoder(self.config)
        self.lm_head = nn.Linear(self.config.hidden_size, self.config.vocab_size, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the mean loss over rows of tokens, each with the one that follows."""
        logits = self.lm_head(self.model(tokens[:, :-1]))
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
