"""The tiny model while it is trained: the Llama arithmetic with the layers' weights stacked, exported to Hugging Face.

Stacking lets the optimizer treat all layers in one batched product, and the forward pass compile to few kernels;
`tests/unit/models/test_tiny.py` checks that the exported model gives the same logits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.vocabulary import MAX_LENGTH, SPECIAL_TOKENS, VOCAB_SIZE

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

LAYERS = 6
HIDDEN = 192
QUERY_HEADS = 6
KV_HEADS = 2
HEAD_DIM = 32
INTERMEDIATE = 512
ROPE_THETA = 10000.0
NORM_EPS = 1e-5
ANSWER_WEIGHT = 2.0
"""Loss weights above this mark answer tokens, whose accuracy is counted."""


def _rotation(length: int) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary angles, each [length, 1, HEAD_DIM / 2]."""
    inverse = ROPE_THETA ** (-torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)
    angles = torch.arange(length).float()[:, None, None] * inverse
    return angles.cos(), angles.sin()


class TinyNet(nn.Module):
    """Llama with grouped KV heads and tied embeddings; every weight is stacked over layers, [layers, out, in]."""

    cos: Tensor
    sin: Tensor

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.dtype = dtype

        def matrix(out: int, into: int, gain: float) -> nn.Parameter:
            return nn.Parameter(torch.randn(LAYERS, out, into) * gain / math.sqrt(into))

        self.embed = nn.Parameter(torch.randn(VOCAB_SIZE, HIDDEN) * 0.02)
        self.q = matrix(QUERY_HEADS * HEAD_DIM, HIDDEN, 0.6)
        self.k = matrix(KV_HEADS * HEAD_DIM, HIDDEN, 0.6)
        self.v = matrix(KV_HEADS * HEAD_DIM, HIDDEN, 0.6)
        self.o = matrix(HIDDEN, QUERY_HEADS * HEAD_DIM, 0.0)
        self.gate = matrix(INTERMEDIATE, HIDDEN, 0.6)
        self.up = matrix(INTERMEDIATE, HIDDEN, 0.6)
        self.down = matrix(HIDDEN, INTERMEDIATE, 0.0)
        self.norm1 = nn.Parameter(torch.ones(LAYERS, HIDDEN))
        self.norm2 = nn.Parameter(torch.ones(LAYERS, HIDDEN))
        self.norm = nn.Parameter(torch.ones(HIDDEN))
        cos, sin = _rotation(MAX_LENGTH)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def matrices(self) -> list[nn.Parameter]:
        """The stacked weight matrices inside the layers: what Muon updates."""
        return [self.q, self.k, self.v, self.o, self.gate, self.up, self.down]

    def others(self) -> list[nn.Parameter]:
        """Embedding and norm gains: what AdamW updates."""
        return [self.embed, self.norm1, self.norm2, self.norm]

    def _normed(self, x: Tensor, gain: Tensor) -> Tensor:
        return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + NORM_EPS) * gain).to(self.dtype)

    def logits(self, ids: Tensor) -> Tensor:
        """Next-token logits, float32 [rows, tokens, vocabulary], of ids [rows, tokens]."""
        rows, length = ids.shape
        heads = QUERY_HEADS + KV_HEADS
        cos, sin = self.cos[:length], self.sin[:length]
        h = F.embedding(ids, self.embed)
        qkv = torch.cat((self.q, self.k, self.v), 1).to(self.dtype).unbind(0)
        gate_up = torch.cat((self.gate, self.up), 1).to(self.dtype).unbind(0)
        out, down = self.o.to(self.dtype).unbind(0), self.down.to(self.dtype).unbind(0)
        norm1, norm2 = self.norm1.unbind(0), self.norm2.unbind(0)
        for i in range(LAYERS):
            x = F.linear(self._normed(h, norm1[i]), qkv[i]).view(rows, length, heads + KV_HEADS, HEAD_DIM)
            a, b = x[:, :, :heads].float().chunk(2, -1)
            turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(self.dtype)
            mixed = F.scaled_dot_product_attention(
                turned[:, :, :QUERY_HEADS].transpose(1, 2),
                turned[:, :, QUERY_HEADS:].transpose(1, 2),
                x[:, :, heads:].transpose(1, 2),
                is_causal=True,
                enable_gqa=True,
            )
            h = h + F.linear(mixed.transpose(1, 2).reshape(rows, length, -1), out[i]).float()
            gate, up = F.linear(self._normed(h, norm2[i]), gate_up[i]).chunk(2, -1)
            h = h + F.linear(F.silu(gate) * up, down[i]).float()
        return F.linear(self._normed(h, self.norm), self.embed.to(self.dtype)).float()

    def forward(
        self, ids: Tensor, weights: Tensor, taught: Tensor | None = None, share: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the weighted loss, right answer tokens and all of them; ids and weights [rows, tokens].

        `share` [rows] of the loss is the cross-entropy with the predictions of another model, whose logits are
        `taught` [rows, tokens, vocabulary] (Hinton, Vinyals and Dean, 2015, section 2, at temperature 1).
        """
        logits = self.logits(ids)[:, :-1].reshape(-1, VOCAB_SIZE)
        target, weight = ids[:, 1:].reshape(-1), weights[:, 1:].reshape(-1)
        loss = F.cross_entropy(logits, target, reduction="none")
        if taught is not None and share is not None:
            likely = taught[:, :-1].reshape(-1, VOCAB_SIZE).softmax(-1)
            soft = F.cross_entropy(logits, likely, reduction="none")
            part = share[:, None].expand(-1, ids.shape[1] - 1).reshape(-1)
            loss = loss.lerp(soft, part)
        answers = weight > ANSWER_WEIGHT
        right = ((logits.argmax(-1) == target) & answers).sum()
        return (loss * weight).sum() / weight.sum(), right, answers.sum()

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight by its name in a `LlamaForCausalLM`, those of layers as views of their stack."""
        yield "model.embed_tokens.weight", self.embed
        yield "model.norm.weight", self.norm
        names = {
            "self_attn.q_proj": self.q,
            "self_attn.k_proj": self.k,
            "self_attn.v_proj": self.v,
            "self_attn.o_proj": self.o,
            "mlp.gate_proj": self.gate,
            "mlp.up_proj": self.up,
            "mlp.down_proj": self.down,
            "input_layernorm": self.norm1,
            "post_attention_layernorm": self.norm2,
        }
        for name, stacked in names.items():
            for i in range(LAYERS):
                yield f"model.layers.{i}.{name}.weight", stacked[i]

    @torch.no_grad()
    def take(self, state: Mapping[str, Tensor]) -> None:
        """Copy the weights of an exported model, by their names there."""
        for name, weight in self._named():
            weight.copy_(state[name])

    @torch.no_grad()
    def export(self) -> LlamaForCausalLM:
        """The same model as a float16 `LlamaForCausalLM` with its configuration and generation settings."""
        from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

        end, _, turn_end = range(len(SPECIAL_TOKENS))
        config = LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=HIDDEN,
            intermediate_size=INTERMEDIATE,
            num_hidden_layers=LAYERS,
            num_attention_heads=QUERY_HEADS,
            num_key_value_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            max_position_embeddings=MAX_LENGTH,
            rope_theta=ROPE_THETA,
            rms_norm_eps=NORM_EPS,
            tie_word_embeddings=True,
            bos_token_id=end,
            eos_token_id=[end, turn_end],
            pad_token_id=end,
        )
        model = LlamaForCausalLM(config)
        state = dict(self._named()) | {"lm_head.weight": self.embed}
        model.load_state_dict(state)
        model.generation_config = GenerationConfig(
            bos_token_id=end, eos_token_id=[end, turn_end], pad_token_id=end, do_sample=False
        )
        half: LlamaForCausalLM = model.half().eval()
        return half


def orthogonalized(matrix: Tensor, steps: int = 5) -> Tensor:
    """The nearest semi-orthogonal matrices of a stack [layers, out, in], by Newton and Schulz's quintic iteration."""
    x = matrix.bfloat16()
    wide = x.size(-2) > x.size(-1)
    x = x.mT if wide else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    out: Tensor = x.mT if wide else x
    return out.to(matrix.dtype)


class Muon(torch.optim.Optimizer):
    """Momentum, then orthogonalized: equal steps in every direction. For stacks of matrices [layers, out, in]."""

    def __init__(self, params: list[nn.Parameter], lr: float = 0.02, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every stack from its gradient."""
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if "average" not in state:
                    state["average"] = torch.zeros_like(param)
                average = state["average"].lerp_(param.grad, 1 - group["momentum"])
                update = orthogonalized(param.grad.lerp(average, group["momentum"]))
                scale = max(1.0, param.size(-2) / param.size(-1)) ** 0.5
                param.mul_(1 - group["lr"] * 0.05).add_(update, alpha=-group["lr"] * scale)
