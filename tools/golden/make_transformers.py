"""Freeze the logits of tiny EAGLE heads with attention of the PyPI package ``transformers``.

    pip install torch "transformers==5.19.0"
    python tools/golden/make_transformers.py [VARIANT ...]

Heads with latent attention and Mistral's come from trainers that are not on PyPI. The few lines
that only these have are written here from vLLM's and TorchSpec's models; attention, rotary
embedding and MLP are the library's. Everything is computed anew for every prefix, without a cache.

Writes ``native-VARIANT/``, among the golden heads of the tests: the checkpoint as its trainer
writes it (bfloat16), and ``expected.safetensors`` as make_speculators.py does, with the target's
``embed_tokens`` and ``lm_head`` if the checkpoint has none.
"""

import json
from collections.abc import Callable
from types import ModuleType

import torch
from common import (
    GOLDEN,
    NUM_SLOTS,
    YARN,
    chosen,
    every_prefix,
    random_vocabulary,
    randomize,
    report,
)
from safetensors.torch import save_file
from torch import nn
from transformers import DeepseekV3Config, Ministral3Config, Mistral4Config
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
from transformers.models.ministral3 import modeling_ministral3 as ministral3
from transformers.models.mistral4 import modeling_mistral4 as mistral4

SIZES = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
}
LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
POSITIONS = {"llama_4_scaling_beta": 0.3, "original_max_position_embeddings": 4}
NORM = deepseek.DeepseekV3RMSNorm
PREFIXES = {deepseek: "DeepseekV3", mistral4: "Mistral4", ministral3: "Ministral3"}


def part(modules: ModuleType, name: str) -> type:
    """Return the library's class for a part of a model."""
    return getattr(modules, PREFIXES[modules] + name)


class Layer(nn.Module):
    """A llama layer, or if it ``sees`` the embedding, the layer of vLLM's deepseek_eagle3."""

    def __init__(self, modules: ModuleType, config: object, sees: bool):
        super().__init__()
        size = config.hidden_size
        self.sees = sees
        self.input_layernorm = NORM(size, config.rms_norm_eps)
        if sees:
            self.hidden_norm = NORM(size, config.rms_norm_eps)
        self.post_attention_layernorm = NORM(size, config.rms_norm_eps)
        self.self_attn = part(modules, "Attention")(config, 0)
        if sees:
            for name in ("q_a_proj", "q_proj", "kv_a_proj_with_mqa"):
                matrix = getattr(self.self_attn, name, None)
                if matrix is not None:
                    wide = nn.Linear(2 * size, matrix.out_features, bias=False)
                    setattr(self.self_attn, name, wide)
        self.mlp = part(modules, "MLP")(config)

    def forward(self, embeddings, states, before_residual, **attention):
        if self.sees:
            normed = self.hidden_norm(states)
            x = torch.cat([self.input_layernorm(embeddings), normed], dim=-1)
            residual = normed if before_residual else states
        else:
            x = self.input_layernorm(states)
            residual = states
        states = residual + self.self_attn(x[None], **attention)[0][0]
        return states + self.mlp(self.post_attention_layernorm(states))


class Head(nn.Module):
    """An EAGLE-3 head, or if it ``is_first``, an EAGLE-1 head such as Mistral's."""

    def __init__(self, modules, config, num_layers, is_first, flags, draft_size):
        super().__init__()
        config._attn_implementation = "eager"
        size = config.hidden_size
        num_aux = 1 if is_first else 3
        self.is_first = is_first
        self.flags = flags
        self.embed_tokens = nn.Embedding(config.vocab_size, size)
        self.fc = nn.Linear(2 * size if is_first else num_aux * size, size, bias=False)
        if flags.get("fc_norm"):
            self.fc_norm = nn.ModuleList([NORM(size, config.rms_norm_eps) for _ in range(3)])
        self.layers = nn.ModuleList(
            [Layer(modules, config, not is_first and i == 0) for i in range(num_layers)]
        )
        self.norm = NORM(size, config.rms_norm_eps)
        self.lm_head = nn.Linear(size, draft_size, bias=False)
        self.rope = part(modules, "RotaryEmbedding")(config)

    def fuse(self, features):
        if self.is_first:
            return features
        parts = features.split(self.fc.in_features // 3, dim=-1)
        if self.flags.get("fc_norm"):
            parts = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=False)]
        return self.fc(torch.cat(parts, dim=-1))

    def forward(self, tokens, states):
        """Compute the logits of all slots and the states that are fed back."""
        embeddings = self.embed_tokens(tokens)
        rows = len(tokens)
        if self.is_first:
            states = self.fc(torch.cat([embeddings, states], dim=-1))
        positions = torch.arange(rows)[None]
        mask = torch.full((1, 1, rows, rows), float("-inf")).triu(1)
        for layer in self.layers:
            states = layer(
                embeddings,
                states,
                self.flags.get("norm_before_residual", False),
                position_embeddings=self.rope(states[None], positions),
                attention_mask=mask,
                position_ids=positions,
            )
        normed = self.norm(states)
        return self.lm_head(normed), normed if self.flags.get("norm_output") else states


@torch.no_grad()
def expect(head: Head) -> dict[str, torch.Tensor]:
    size = head.norm.weight.shape[0]
    num_aux = 1 if head.is_first else 3
    tokens = torch.randint(0, head.embed_tokens.num_embeddings, (NUM_SLOTS,))
    features = (torch.randn(NUM_SLOTS, num_aux, size) * 2).flatten(1)
    return every_prefix(tokens, features, head.fuse, head)


def latent_eagle3(rope: dict, num_layers: int, flags: dict, draft_size: int, **sizes) -> Callable:
    """Return a function that makes an Eagle3DeepseekV2ForCausalLM head and its config.json."""

    def make() -> tuple[Head, dict]:
        values = {**SIZES, **LATENT, **sizes}
        config = DeepseekV3Config(**values, rope_parameters=rope, attention_bias=False)
        head = Head(deepseek, config, num_layers, False, flags, draft_size)
        scaling = None if rope["rope_type"] == "default" else {**rope, "type": "yarn"}
        written = {
            "architectures": ["Eagle3DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v3",
            **values,
            **flags,
            "num_hidden_layers": num_layers,
            "draft_vocab_size": draft_size,
            "rope_theta": rope["rope_theta"],
            "rope_scaling": scaling,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 5, 8]},
        }
        return head, written

    return make


def mistral_latent() -> tuple[Head, dict]:
    """Make a head like Mistral-Large-3's: latent attention, yarn without a factor on scores."""
    rope = {**YARN, **POSITIONS}
    config = Mistral4Config(**SIZES, **LATENT, rope_parameters=rope, attention_bias=False)
    head = Head(mistral4, config, 2, True, {"norm_output": True}, 128)
    for layer in head.layers:
        layer.self_attn.scaling = 14**-0.5
    yarn = {"factor": 8.0, "original_max_position_embeddings": 4, "beta": 32.0, "alpha": 1.0}
    return head, {
        **params(2),
        **LATENT,
        "rope_theta": 50000.0,
        "yarn": {**yarn, "apply_scale": False},
        "llama_4_scaling": {"beta": 0.3, "original_max_position_embeddings": 4},
    }


def mistral_grouped() -> tuple[Head, dict]:
    """Make a head like Mistral-Medium's: grouped-query attention."""
    sizes = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
    rope = {**PLAIN, **POSITIONS}
    config = Ministral3Config(**sizes, rope_parameters=rope, sliding_window=None)
    head = Head(ministral3, config, 1, True, {"norm_output": True}, 128)
    scaling = {"beta": 0.3, "original_max_position_embeddings": 4}
    return head, {**params(1), "n_kv_heads": 2, "head_dim": 8, "llama_4_scaling": scaling}


def params(num_layers: int) -> dict:
    """Make the part of ``params.json`` that Mistral's heads share."""
    return {
        "dim": 32,
        "n_layers": num_layers,
        "hidden_dim": 64,
        "n_heads": 4,
        "n_kv_heads": 4,
        "norm_eps": 1e-6,
        "vocab_size": 128,
        "rope_theta": 10000.0,
        "max_position_embeddings": 256,
    }


EAGLE_31 = {"fc_norm": True, "norm_output": True}
VARIANTS = {
    "mla-eagle31": latent_eagle3(YARN, 1, EAGLE_31, 128),
    "mla-two-layers": latent_eagle3(PLAIN, 2, {"norm_before_residual": True}, 48),
    "mla-whole-queries": latent_eagle3(YARN, 1, {}, 48, q_lora_rank=None),
    "mistral-mla": mistral_latent,
    "mistral-grouped": mistral_grouped,
}
MISTRAL_NAMES = {
    "fc.": "eagle_linear.",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_a_proj": "attention.wq_a",
    "self_attn.q_a_layernorm": "attention.q_a_norm",
    "self_attn.q_b_proj": "attention.wq_b",
    "self_attn.kv_a_proj_with_mqa": "attention.wkv_a_with_mqa",
    "self_attn.kv_a_layernorm": "attention.kv_a_norm",
    "self_attn.kv_b_proj": "attention.wkv_b",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
}


def as_mistral(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Give tensors Mistral's names and its order of the rows of q and k: pairs are neighbours."""
    found = {}
    for name, tensor in tensors.items():
        if name.endswith(("self_attn.q_proj.weight", "self_attn.k_proj.weight")):
            tensor = tensor.unflatten(0, (-1, 2, 4)).transpose(1, 2).flatten(0, 2)
        for old, new in MISTRAL_NAMES.items():
            name = name.replace(old, new)
        found[name] = tensor
    return found


def main() -> None:
    torch.set_num_threads(1)
    for seed, variant in chosen(VARIANTS):
        torch.manual_seed(300 + seed)
        head, config = VARIANTS[variant]()
        randomize(head)
        expected = expect(head)
        tensors = {name: tensor.to(torch.bfloat16) for name, tensor in head.state_dict().items()}
        tensors = {name: tensor for name, tensor in tensors.items() if "rope" not in name}
        embed = tensors.pop("embed_tokens.weight")
        output = tensors.pop("lm_head.weight")
        expected["embed_tokens"] = embed.float()
        if "dim" in config:
            expected["lm_head"] = output.float()
            tensors = as_mistral(tensors)
            files = "params.json", "consolidated.safetensors"
        else:
            tensors = {k.replace("layers.0.", "midlayer."): v for k, v in tensors.items()}
            tensors["lm_head.weight"] = output
            if config["draft_vocab_size"] < config["vocab_size"]:
                tensors["t2d"], tensors["d2t"] = random_vocabulary(128, 48)
            files = "config.json", "model.safetensors"
        folder = GOLDEN / f"native-{variant}"
        folder.mkdir(exist_ok=True)
        (folder / files[0]).write_text(json.dumps(config, indent=2) + "\n")
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(tensors, folder / files[1], {"format": "pt"})
        save_file(expected, folder / "expected.safetensors")
        report(folder)


if __name__ == "__main__":
    main()
