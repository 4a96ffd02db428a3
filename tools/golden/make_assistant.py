"""Write golden/assistant-*: Gemma 4 assistants with targets, and the arrays of transformers.

After each beginning of a text that the target has written, an assistant drafts three tokens, from
the keys and values of that beginning only: of all positions in full layers, of the last
``sliding_window`` in sliding ones. These and the target's states are frozen too. After a prompt,
the class in transformers that drafts with assistants returns the same numbers, which are printed.
"learned" has been trained on the target's texts.
"""

import json

import torch
from common import GOLDEN, chosen
from safetensors.torch import save_file
from transformers import (
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GenerationConfig,
)
from transformers.generation.candidate_generator import (
    SinglePositionMultiTokenCandidateGenerator,
)

SLIDING = "sliding_attention"
FULL = "full_attention"
WINDOW = 12  # positions
VOCAB = 64  # tokens
NUM_STEPS = 3  # drafts in a chain
PROMPTS = [[5, 17, 3, 48, 41, 2, 60, 9], [7, 9, 11, 30, 8], [33, 4, 25, 8, 1, 50, 12]]
LENGTH = 30  # tokens that the target writes after a prompt
NUM_PLACES = 18  # positions after which drafts are kept
TEACHING = 700  # steps of training
SEEDS = {"dense": 6, "clusters": 3, "learned": 2}
COMMON = {
    "vocab_size": VOCAB,
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": WINDOW,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SHARED = {  # as E2B and E4B: the last layers read keys and values of earlier ones
    "num_hidden_layers": 6,
    "layer_types": [SLIDING, FULL] * 3,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 4,
    "vocab_size_per_layer_input": VOCAB,
    "use_double_wide_mlp": True,
}
FOUR_LAYERS = {
    "num_hidden_layers": 4,
    "layer_types": [SLIDING, SLIDING, SLIDING, FULL],
    "hidden_size_per_layer_input": 0,
    "use_double_wide_mlp": False,
}
LARGE = FOUR_LAYERS | {  # as 31B: in full layers, keys are values too
    "num_kv_shared_layers": 0,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
}
VARIANTS = {
    "dense": (LARGE, {}, {}),
    "clusters": (
        SHARED,
        {},
        {"use_ordered_embeddings": True, "num_centroids": 16, "centroid_intermediate_top_k": 5},
    ),
    "learned": (SHARED, {"hidden_size": 48, "intermediate_size": 64}, {}),
}


def randomize(model: torch.nn.Module, scale: float = 0.25) -> torch.nn.Module:
    """Set random weights that bfloat16 holds exactly; norms are not 1."""
    for weight in model.parameters():
        centre = 1.0 if weight.dim() == 1 else 0.0
        weight.data = (centre + scale * torch.randn(weight.shape)).to(torch.bfloat16).float()
    return model.eval()


def make_target(sizes: dict) -> Gemma4ForCausalLM:
    model = randomize(Gemma4ForCausalLM(Gemma4TextConfig(**sizes)))
    for layer in model.model.layers:
        layer.layer_scalar.fill_(0.75)
    return model


def make_assistant(target: Gemma4ForCausalLM, sizes: dict, more: dict):
    text = COMMON | FOUR_LAYERS
    text |= {"num_kv_shared_layers": 4, "vocab_size_per_layer_input": 0, **sizes}
    config = Gemma4AssistantConfig(
        text_config=Gemma4TextConfig(**text),
        backbone_hidden_size=target.config.hidden_size,
        **more,
    )
    model = randomize(Gemma4AssistantForCausalLM(config))
    for i, layer in enumerate(model.model.layers):
        layer.layer_scalar.fill_(0.5 + 0.25 * i)
        # Attention has no scale here, and if it were sharper, it would magnify rounding.
        layer.self_attn.q_norm.weight.data *= 0.25
    if model.masked_embedding is not None:
        model.masked_embedding.token_ordering.copy_(torch.randperm(VOCAB))
    return model


@torch.no_grad()
def text_after(target: Gemma4ForCausalLM, prompt: list[int], length: int) -> list[int]:
    text = list(prompt)
    for _ in range(length):
        text.append(int(target(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    return text


@torch.no_grad()
def seen_in(target: Gemma4ForCausalLM, text: list[int]):
    """Return the states (1, P, H) after the final norm, and keys and values of two layers."""
    made = target(
        torch.tensor([text]),
        use_cache=False,
        output_hidden_states=True,
        return_shared_kv_states=True,
    )
    return made.hidden_states[-1], made.shared_kv_states


def cut(rows: dict, num_rows: int) -> dict:
    """Cut keys and values to those in the caches after ``num_rows`` positions."""
    first = {FULL: 0, SLIDING: max(0, num_rows - WINDOW)}
    return {kind: tuple(a[:, :, first[kind] : num_rows] for a in rows[kind]) for kind in rows}


def steps(target, assistant, states, rows, tokens: list[int], num_rows: int, taught: bool):
    """Compute the logits (k, V) of a draft after ``num_rows`` positions; tokens[0] is the newest.

    With ``taught``, the other tokens are fed back, and not the drafted ones.
    """
    embed = target.get_input_embeddings()
    state = states[:, num_rows - 1 : num_rows]
    found = []
    token = torch.tensor([tokens[:1]])
    place = torch.tensor([[num_rows]])
    for j in range(NUM_STEPS):
        joined = torch.cat([embed(token).detach(), state], dim=-1)
        made = assistant(
            inputs_embeds=joined, position_ids=place, shared_kv_states=cut(rows, num_rows)
        )
        found.append(made.logits[0, 0])
        state = made.last_hidden_state
        token = torch.tensor([tokens[j + 1 : j + 2]]) if taught else made.logits.argmax(dim=-1)
    return torch.stack(found)


def vendors_logits(target, assistant, prompt: list[int], newest: int) -> torch.Tensor:
    """Compute the same after a prompt, with the class that transformers drafts with."""
    generation = GenerationConfig(max_length=999, num_assistant_tokens=NUM_STEPS)
    assistant.generation_config = generation
    drafter = SinglePositionMultiTokenCandidateGenerator(
        assistant, target.get_input_embeddings(), generation
    )
    with torch.no_grad():
        outputs = target(
            torch.tensor([prompt]),
            use_cache=True,
            output_hidden_states=True,
            return_shared_kv_states=True,
        )
        text = torch.tensor([[*prompt, newest]])
        return drafter.get_candidates(text, {}, outputs, False, n_last_matches=0)[1][0]


def teach(target, assistant, texts: list[list[int]]) -> None:
    """Train on three tokens from each place of the texts, until the assistant knows them."""
    seen = [seen_in(target, text) for text in texts]
    places = [
        (i, n)
        for i, text in enumerate(texts)
        for n in range(len(PROMPTS[i]), len(text) - NUM_STEPS)
    ]
    optimizer = torch.optim.Adam(assistant.parameters(), 3e-3)
    for step in range(TEACHING):
        picked = [places[n] for n in torch.randperm(len(places))[:8]]
        losses = []
        for i, n in picked:
            logits = steps(target, assistant, *seen[i], texts[i][n:], n, taught=True)
            wanted = torch.tensor(texts[i][n + 1 : n + 1 + NUM_STEPS])
            losses.append(torch.nn.functional.cross_entropy(logits, wanted))
        loss = torch.stack(losses).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(assistant.parameters(), 1.0)
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * (1 - step / TEACHING)
        if step % 100 == 0:
            print(step, loss.item(), flush=True)
    for weight in assistant.parameters():
        weight.data = weight.data.to(torch.bfloat16).float()


def freeze(name: str, sizes: dict, target, assistant, expected: dict) -> None:
    folder = GOLDEN / f"assistant-{name}"
    assistant.to(torch.bfloat16).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    weights = {key: value.to(torch.bfloat16) for key, value in target.state_dict().items()}
    weights = {
        key: value.contiguous() for key, value in weights.items() if key != "lm_head.weight"
    }
    save_file(weights, folder / "target.safetensors")
    (folder / "target.json").write_text(json.dumps(sizes, indent=1) + "\n")
    save_file(expected, folder / "expected.safetensors")
    print(name, sum(file.stat().st_size for file in folder.iterdir()), "bytes")


def main() -> None:
    for _, name in chosen(VARIANTS):
        torch.manual_seed(SEEDS[name])
        sizes, own, more = VARIANTS[name]
        sizes = COMMON | sizes
        target = make_target(sizes)
        assistant = make_assistant(target, own, more)
        texts = [text_after(target, prompt, LENGTH) for prompt in PROMPTS]
        print(texts)
        if name == "learned":
            teach(target, assistant, texts)
            freeze(
                name,
                sizes,
                target,
                assistant,
                {"texts": torch.tensor([t[-LENGTH:] for t in texts])},
            )
            continue
        text = texts[0]
        start = len(PROMPTS[0])
        states, rows = seen_in(target, text)
        with torch.no_grad():
            found = [
                steps(target, assistant, states, rows, text[n:], n, taught=False)
                for n in range(start, start + NUM_PLACES)
            ]
        vendors = vendors_logits(target, assistant, text[:start], text[start])
        print("vendor", (vendors - found[0]).abs().max().item(), vendors.abs().max().item())
        expected = {"text": torch.tensor(text), "logits": torch.stack(found), "states": states}
        for kind in rows:
            expected |= {f"{kind}.keys": rows[kind][0], f"{kind}.values": rows[kind][1]}
        expected = {name: array.contiguous() for name, array in expected.items()}
        freeze(name, sizes, target, assistant, expected)


if __name__ == "__main__":
    main()
