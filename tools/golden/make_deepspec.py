"""Freeze DeepSpec's logits of tiny random EAGLE-3 heads of its Gemma-4 layout.

    pip install torch "transformers==5.10.2" && git clone https://github.com/deepseek-ai/DeepSpec
    PYTHONPATH=DeepSpec python tools/golden/make_deepspec.py [VARIANT ...]

DeepSpec is no package: its model's module is loaded from the clone, without its trainer. Writes
``native-VARIANT/``, among the golden heads of the tests, as make_transformers.py does. The model
is run anew for every prefix, without a cache.
"""

import json

import torch
from common import GOLDEN, NUM_SLOTS, chosen, every_prefix, randomize, report, without_init
from safetensors.torch import save_file

without_init("deepspec", "deepspec.modeling", "deepspec.modeling.eagle3", "deepspec.utils")

from deepspec.modeling.eagle3.gemma4.modeling import Gemma4Eagle3Model  # noqa: E402
from transformers import Gemma4TextConfig  # noqa: E402

SIZES = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "head_dim": 8,
    "global_head_dim": 16,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "enable_moe_block": False,
    "final_logit_softcapping": 3.0,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 1000.0,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
VARIANTS = {
    "gemma4": (1, {"attention_k_eq_v": True}),
    "gemma4-values": (2, {"attention_k_eq_v": False, "final_logit_softcapping": None}),
}


@torch.no_grad()
def expect(model: Gemma4Eagle3Model) -> dict[str, torch.Tensor]:
    num_aux = len(model.target_layer_ids)
    size = model.config.hidden_size
    tokens = torch.randint(0, model.config.vocab_size, (NUM_SLOTS,))
    features = torch.randn(NUM_SLOTS, num_aux * size) * 2

    def forward(fed: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.arange(len(fed))[None]
        out = model(hidden_states=states[None], input_ids=fed[None], position_ids=positions)
        return model.compute_logits(out)[0], out[0]

    return every_prefix(tokens, features, model.project_hidden_states, forward)


def main() -> None:
    torch.set_num_threads(1)
    for seed, variant in chosen(VARIANTS):
        torch.manual_seed(400 + seed)
        num_layers, changes = VARIANTS[variant]
        config = Gemma4TextConfig(
            **{**SIZES, **changes},
            num_hidden_layers=num_layers,
            layer_types=["full_attention"] * num_layers,
            target_layer_ids=[5, 17, 29, 41, 46],
            num_target_layers=48,
            ttt_length=7,
            step_loss_decay=0.8,
            tie_word_embeddings=False,
            architectures=["Gemma4Eagle3Model"],
        )
        config._attn_implementation = "sdpa"
        model = randomize(Gemma4Eagle3Model(config))
        for i, layer in enumerate(model.layers):
            layer.layer_scalar.fill_(0.75 - 0.25 * i)
        expected = expect(model)
        expected["embed_tokens"] = model.embed_tokens.weight.detach().clone()
        folder = GOLDEN / f"native-{variant}"
        model.to(torch.bfloat16).save_pretrained(folder)
        written = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(written, indent=2) + "\n")
        save_file(expected, folder / "expected.safetensors")
        report(folder)


if __name__ == "__main__":
    main()
