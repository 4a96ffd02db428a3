"""Public heads and their trainers' templates: the sizes and keys of their configs, a row each.

Collected from pages and published configs. What nobody has published (a width or depth of a
target) is a guess of the right order.
"""

IDS = "eagle_aux_hidden_state_layer_ids"


def head(
    depth: int, h: int, mlp: int, q: int, kv: int, dim: int, vocab: int, draft: int | None, **more
) -> dict:
    """A row: the target's depth, then the head's sizes; keys of its config, and of this test.

    ``taps`` (default: the default ones), ``layers``, ``aux``, ``nested`` (a speculators config),
    ``extra`` and ``lacks`` (tensors), ``wide`` (the target's hidden size), ``owns`` (a table of
    embeddings), ``fields``, ``unsaid`` (keys that its config has not), ``assumed`` (what no page
    says, and what speaks for it), ``published`` (megabytes, by its page).
    """
    config = {
        "hidden_size": h,
        "intermediate_size": mlp,
        "num_attention_heads": q,
        "num_key_value_heads": kv,
        "head_dim": dim,
        "vocab_size": vocab,
        "draft_vocab_size": draft,
    }
    options = ("taps", "layers", "aux", "nested", "extra", "lacks", "wide", "fields", "unsaid")
    options += ("owns", "assumed", "published")
    row = {name: more.pop(name) for name in options if name in more}
    return row | {"config": config | more, "depth": depth}


def nested_ids(*ids: int) -> dict:
    return {"eagle_config": {IDS: list(ids)}}


LATENT = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
KIMI_YARN = {
    "type": "yarn",
    "factor": 64.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
KIMI = (61, 7168, 12288, 64, 64, 192, 163840, None)
KIMI_MLA = {
    **LATENT,
    "architectures": ["Eagle3DeepseekV2ForCausalLM"],
    "rope_theta": 5e4,
    "rope_scaling": KIMI_YARN,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 262144,
}
LLAMA_8B = (32, 4096, 14336, 32, 8, 128, 128256, 32000)
LLAMA_70B = (80, 8192, 28672, 64, 8, 128, 128256, 32000)
QWEN3_8B = (36, 4096, 12288, 32, 8, 128, 151936, 32000)
QWEN3_14B = (40, 5120, 17408, 40, 8, 128, 151936, 32000)
QWEN3_32B = (64, 5120, 25600, 64, 8, 128, 151936, 32000)
QWEN3_30B = (48, 2048, 12288, 32, 4, 128, 151936, 32000)
QWEN3_235B = (94, 4096, 24576, 64, 4, 128, 151936, 32000)
MAVERICK = (48, 5120, 16384, 40, 8, 128, 202048, 32000)
GPT_20B = (24, 2880, 17280, 64, 8, 64, 201088, 32000)
GPT_120B = (36, 2880, 17280, 64, 8, 64, 201088, 32000)
MINIMAX_M2 = (62, 3072, 8192, 24, 8, 128, 200064, 32000)
GEMMA_31B = (60, 5376, 21504, 32, 16, 256, 262144, 32000)
EAGLE_31 = {"fc_norm": True, "norm_output": True}
SPECULATORS = {"nested": "llama", "norm_before_residual": True}
QWEN_SPECULATORS = {"nested": "qwen3", "norm_before_residual": True}
QK_NORM = {"self_attn.q_norm": (128,), "self_attn.k_norm": (128,)}
FIVE = {"aux": 5, "target_layer_ids": [1, 9, 17, 25, 33], "taps": (2, 10, 18, 26, 34)}

HEADS = {
    # 7.1 official and closely related
    "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B": head(*LLAMA_8B, rms_norm_eps=1e-5),
    "yuhuili/EAGLE3-LLaMA3.3-Instruct-70B": head(
        80, 6144, 16384, 48, 8, 128, 128256, 32000, wide=8192, target_hidden_size=8192
    ),
    "yuhuili/EAGLE3-DeepSeek-R1-Distill-LLaMA-8B": head(*LLAMA_8B),
    "yuhuili/EAGLE3-Vicuna1.3-13B": head(
        40, 5120, 13824, 40, 40, 128, 32000, 32000, num_hidden_layers=40
    ),
    "nebius/EAGLE3-Llama-3.3-70B-Instruct": head(*LLAMA_70B),
    "AvitoTech/avibe-eagle": head(36, 4096, 12288, 32, 8, 128, 116394, 32000),
    "linglingdan/Eagle3_for_MiniCPM4": head(32, 4096, 16384, 32, 2, 128, 73448, 15000),
    "wantsleep/OLMoE_1B_7B_Eagle3": head(16, 2048, 8192, 16, 16, 128, 50304, 32000),
    "wantsleep/granite-3.1-1b-a400m-EAGLE3": head(24, 1024, 4096, 16, 8, 64, 49155, 32000),
    "mahmoudhas9/tiny-eagle3": head(8, 40, 80, 1, 1, 128, 32000, 8000),
    # 7.2 SpecForge's format
    "lmsys/SGLang-EAGLE3-Llama-3.1-8B-Instruct-SpecForge": head(*LLAMA_8B),
    "lmsys/SGLang-EAGLE3-Llama-3.3-70B-Instruct-SpecForge": head(
        *LLAMA_70B,
        rope_theta=5e5,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 4096,
        },
    ),
    "lmsys/SGLang-EAGLE3-Llama-4-Scout-17B-16E-Instruct-SpecForge": head(
        48, 5120, 32768, 40, 8, 128, 202048, 32000
    ),
    "lmsys/sglang-EAGLE3-Llama-4-Maverick-17B-128E-Instruct-v1": head(*MAVERICK),
    "template qwen3-4b": head(36, 2560, 9728, 32, 8, 128, 151936, 32000, rope_theta=1e6),
    "Tengyunw/qwen3_8b_eagle3": head(*QWEN3_8B),
    "Zjcxy-SmartAI/Eagle3-Qwen3-8B-zh": head(*QWEN3_8B),
    "thoughtworks/Qwen3-32B-Eagle3": head(*QWEN3_32B),
    "Zjcxy-SmartAI/Eagle3-Qwen3-32B-zh": head(*QWEN3_32B),
    "nex-agi/SGLANG-EAGLE3-Qwen3-32B-Nex-N1": head(*QWEN3_32B),
    "lmsys/SGLang-EAGLE3-Qwen3-30B-A3B-Instruct-2507-SpecForge-Nex": head(*QWEN3_30B),
    "Tengyunw/qwen3_30b_moe_eagle3": head(*QWEN3_30B),
    "nex-agi/SGLANG-EAGLE3-Qwen3-30B-A3B-Nex-N1": head(*QWEN3_30B),
    "template qwen3-30B-A3B-eagle3.1": head(
        *QWEN3_30B, **EAGLE_31, fields={"pre_fc_norm": "per_feature", "norm_output": True}
    ),
    "lmsys/Qwen3-235B-A22B-EAGLE3": head(*QWEN3_235B, **nested_ids(1, 46, 90), taps=(2, 47, 91)),
    "lmsys/SGLang-EAGLE3-Qwen3-235B-A22B-Instruct-2507-SpecForge-Meituan": head(*QWEN3_235B),
    "nvidia/Qwen3-235B-A22B-Eagle3": head(*QWEN3_235B, **nested_ids(1, 46, 90)),
    "lmsys/SGLang-EAGLE3-Qwen3-Coder-30B-A3B": head(*QWEN3_30B),
    "JinnP/SGLang-EAGLE3-Qwen3-Coder-30B-A3B-Instruct": head(*QWEN3_30B),
    "lmsys/SGLang-EAGLE3-Qwen3-Coder-480B-EigenAI": head(
        62, 6144, 16384, 96, 8, 128, 151936, 32000
    ),
    "thoughtworks/Qwen3-Coder-Next-Eagle3": head(
        48, 2048, 8192, 16, 4, 128, 151936, 32000, **nested_ids(3, 23, 47), taps=(4, 24, 48)
    ),
    "template qwen3-next-80b": head(48, 2048, 16384, 16, 2, 256, 151936, 32000, rope_theta=1e7),
    "template qwen3.5-35b-a3b": head(40, 2048, 16384, 16, 2, 256, 248320, 32000, rope_theta=1e7),
    "Ex0bit/Qwen3.6-27B-PRISM-EAGLE3, full": head(64, 5120, 17408, 24, 4, 256, 248320, 248320),
    "Ex0bit/Qwen3.6-27B-PRISM-EAGLE3/compressed": head(
        64,
        5120,
        17408,
        24,
        4,
        128,
        248320,
        32768,
        **nested_ids(1, 31, 60),
        taps=(2, 32, 61),
        published=1100,
        assumed="heads and MLP: with half the target's width of a head, 4% above its page's size",
    ),
    "BLR2/Qwen3.5-9B-Eagle3-ShareGPT": head(
        32,
        4096,
        12288,
        16,
        4,
        256,
        248320,
        32000,
        rope_theta=1e7,
        published=800,
        assumed="sizes, the target's, as in the trainer's templates: they come to its file's",
    ),
    "VirVen/Qwen3.5-27B-EAGLE3-v2/compressed": head(
        64,
        5120,
        17408,
        24,
        4,
        256,
        248320,
        248320,
        rope_theta=1e7,
        assumed="heads and MLP, the target's; one layer and all tokens are known",
    ),
    "template qwen2.5-7b": head(28, 3584, 18944, 28, 4, 128, 152064, 16000),
    "template qwen2.5-vl-7b": head(
        28,
        3584,
        18944,
        28,
        4,
        128,
        152064,
        32000,
        rope_theta=1e6,
        rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]},
    ),
    "template qwen2.5-vl-32b": head(
        64,
        5120,
        18944,
        28,
        4,
        128,
        152064,
        32000,
        rope_theta=1e6,
        rope_scaling={"rope_type": "default", "type": "default", "mrope_section": [16, 24, 24]},
    ),
    "thoughtworks/Qwen2.5-7B-Instruct-Eagle3": head(28, 3584, 18944, 28, 4, 128, 152064, 32000),
    "thoughtworks/Qwen2.5-14B-Instruct-Eagle3": head(48, 5120, 13824, 40, 8, 128, 152064, 32000),
    "thoughtworks/Llama-3.1-8B-Instruct-Eagle3": head(*LLAMA_8B),
    "lmsys/EAGLE3-gpt-oss-120b-bf16": head(*GPT_120B, **nested_ids(1, 17, 33), taps=(2, 18, 34)),
    "zhuyksir/EAGLE3-gpt-oss-20b-bf16": head(*GPT_20B, **nested_ids(1, 11, 21), taps=(2, 12, 22)),
    "Dogacel/specdrift-gpt-oss-20b-eagle3": head(
        *GPT_20B,
        **EAGLE_31,
        layers=2,
        aux=4,
        taps=(2, 8, 14, 20),
        eagle_config={IDS: [1, 7, 13, 19]},
    ),
    "Dogacel/specdrift-gpt-oss-120b-eagle3": head(*GPT_120B, **EAGLE_31),
    "template deepseek-v3": head(
        61, 7168, 40960, 56, 8, 128, 129280, 32000, **nested_ids(1, 29, 57)
    ),
    "template deepseek-v2-lite": head(
        27,
        2048,
        10944,
        16,
        16,
        128,
        102400,
        32000,
        rope_scaling={"type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096},
    ),
    "template gemma3-1b": head(
        26,
        1152,
        6912,
        4,
        1,
        256,
        262144,
        32000,
        rope_theta=1e6,
        sliding_window=512,
        use_sliding_window=False,
        fields={"sliding_window": None},
    ),
    "thoughtworks/Gemma-4-31B-Eagle3": head(*GEMMA_31B),
    "thoughtworks/GLM-4.7-Flash-Eagle3": head(47, 2048, 10240, 20, 20, 128, 154880, 32000),
    "thoughtworks/GLM-4.7-FP8-Eagle3": head(92, 5120, 12288, 96, 8, 128, 151552, 32000),
    "AQ-MedAI/Ling-Flash-2.0-eagle3": head(32, 4096, 14336, 32, 8, 128, 157184, 32000),
    "AQ-MedAI/Kimi-K2-Instruct-eagle3": head(
        61, 7168, 18432, 64, 64, 128, 163840, 32000, **nested_ids(2, 30, 58), rope_theta=1e6
    ),
    "AQ-MedAI/Kimi-K25-eagle3": head(
        61, 7168, 18432, 64, 64, 128, 163840, 32000, **nested_ids(2, 30, 58), rope_theta=1e6
    ),
    "AQ-MedAI/Kimi-K26-eagle3": head(
        61,
        7168,
        18432,
        64,
        64,
        128,
        163840,
        32000,
        **nested_ids(2, 30, 58),
        rope_theta=1e6,
        assumed="all of it, as the same trainer's for K2.5; the one for K2.7 has more tokens",
    ),
    "AQ-MedAI/Kimi-K2.7-Code-eagle3": head(
        61,
        7168,
        18432,
        64,
        64,
        128,
        163840,
        96000,
        **nested_ids(2, 30, 58),
        rope_theta=1e6,
        published=3329,  # 3.1 GiB
        assumed="heads and MLP, as the K2.5's: they come to the size of its files",
    ),
    "lightseekorg/kimi-k2.7-coder-eagle3.1-mla": head(
        *KIMI,
        **KIMI_MLA,
        **EAGLE_31,
        **nested_ids(2, 30, 58),
        assumed="all of it, as the K2.6's; whether a table of embeddings lies in its file",
    ),
    "AQ-MedAI/GLM-5.1-eagle3": head(
        78,
        6144,
        16384,
        48,
        8,
        128,
        154880,
        32000,
        assumed="heads and MLP, those of another trainer's head for GLM-5",
    ),
    "SyzygyResearch/DeepSeek-V4-Flash-EAGLE3.1": head(
        43,
        4096,
        12288,
        32,
        8,
        128,
        129280,
        32000,
        **EAGLE_31,
        **nested_ids(1, 21, 40),
        taps=(2, 22, 41),
        owns=True,
        published=1858.5,
    ),
    "lightseekorg/kimi-k2.5-eagle3": head(
        61, 7168, 12288, 64, 64, 128, 163840, None, rope_theta=5e4, rope_scaling=KIMI_YARN
    ),
    "k-l-lambda/Kimi-K2.5-Eagle3": head(*KIMI, **KIMI_MLA, **nested_ids(1, 29, 57)),
    "lightseekorg/kimi-k2.6-eagle3.1-mla": head(
        *KIMI, **KIMI_MLA, **EAGLE_31, **nested_ids(2, 30, 58)
    ),
    "nvidia/Kimi-K2.5-Thinking-Eagle3": head(*KIMI, **KIMI_MLA, **nested_ids(1, 29, 57)),
    "TorchSpec minimax_m25": head(62, 3072, 9216, 48, 48, 128, 200064, 32000, rope_theta=5e6),
    "thoughtworks/MiniMax-M2.5-Eagle3": head(
        *MINIMAX_M2, **nested_ids(1, 30, 58), taps=(2, 31, 59), published=486.5
    ),
    "IamBerbec/MiniMax-M2.5-Eagle3": head(
        *MINIMAX_M2, assumed="all of it, as another trainer's for this target"
    ),
    "Lorbus/MiniMax-M2.7-EAGLE3": head(
        *MINIMAX_M2,
        published=500,
        assumed="all of it, as another trainer's for M2.5: 3% below the size on its page",
    ),
    "Inferact/MiniMax-M3-EAGLE3": head(
        60,
        6144,
        18432,
        64,
        64,
        128,
        200064,
        None,
        **EAGLE_31,
        owns=True,
        published=6500,
        assumed="key heads, as many as heads: they come to the size of its file",
    ),
    "Inferact/MiniMax-M3-EAGLE3-GQA": head(60, 6144, 18432, 64, 8, 128, 200064, None, **EAGLE_31),
    "zjxia/step-3.5-flash": head(
        45, 4096, 11264, 64, 8, 64, 128896, 32000, **nested_ids(4, 20, 40), taps=(5, 21, 41)
    ),
    "template longcat": head(28, 6144, 12288, 64, 16, 96, 131072, 131072, rope_theta=1e7),
    "template phi4": head(
        40, 5120, 17920, 40, 10, 128, 100352, 32000, rope_theta=2.5e5, model_type="phi3"
    ),
    "template qwq-32b": head(64, 5120, 27648, 40, 8, 128, 152064, 32000, model_type="qwen2"),
    "template qwen2.5-0.5b": head(24, 896, 4864, 14, 2, 64, 151936, 16000),
    "template qwen3-8b-peagle": head(
        *QWEN3_8B, layers=4, mask_token_id=151669, architectures=["PEagleDraftModel"]
    ),
    # 7.3 speculators
    "RedHatAI/gemma-4-31B-it-speculator.eagle3": head(
        *GEMMA_31B, **SPECULATORS, **{IDS: [2, 30, 57]}
    ),
    "RedHatAI/gemma-4-26B-A4B-it-speculator.eagle3": head(
        30, 2816, 8448, 16, 8, 256, 262144, 32000, **SPECULATORS, **{IDS: [2, 15, 27]}
    ),
    "BCCard/MoAI-gemma-4-31B-it-speculator.eagle3": head(
        *GEMMA_31B, **SPECULATORS, **{IDS: [2, 30, 57]}
    ),
    "RedHatAI/gpt-oss-120b-speculator.eagle3": head(
        36, 2880, 2880, 64, 8, 64, 201088, 32000, **SPECULATORS, norm_before_fc=True
    ),
    "RedHatAI/gpt-oss-20b-speculator.eagle3": head(
        24, 2880, 2880, 64, 8, 64, 201088, 32000, **SPECULATORS, rope_theta=5e5
    ),
    "RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3": head(*LLAMA_8B, **SPECULATORS),
    "RedHatAI/Llama-3.3-70B-Instruct-speculator.eagle3": head(*LLAMA_70B, **SPECULATORS),
    "RedHatAI/Qwen3-8B-speculator.eagle3": head(*QWEN3_8B, **SPECULATORS),
    "RedHatAI/Qwen3-14B-speculator.eagle3": head(*QWEN3_14B, **SPECULATORS),
    "RedHatAI/Qwen3-32B-speculator.eagle3": head(*QWEN3_32B, **SPECULATORS),
    "RedHatAI/Qwen3-30B-A3B-Instruct-2507-speculator.eagle3": head(*QWEN3_30B, **SPECULATORS),
    "RedHatAI/Qwen3-235B-A22B-speculator.eagle3": head(*QWEN3_235B, **SPECULATORS),
    "RedHatAI/Qwen3-235B-A22B-Instruct-2507-speculator.eagle3": head(*QWEN3_235B, **SPECULATORS),
    "RedHatAI/Qwen3-VL-235B-A22B-Instruct-speculator.eagle3": head(
        *QWEN3_235B, **QWEN_SPECULATORS
    ),
    "nm-testing/Speculator-Qwen3-8B-Eagle3": head(*QWEN3_8B, **SPECULATORS),
    "RedHatAI/Llama-4-Maverick-17B-128E-Instruct-speculator.eagle3": head(
        *MAVERICK,
        nested="llama",
        norm_before_residual=False,
        taps=(1, 23, 44),
        **{IDS: [1, 23, 44]},
    ),
    "nm-testing/Qwen3-235B-A22B-EAGLE3-converted-speculators-lmsys": head(
        *QWEN3_235B, **SPECULATORS, taps=(1, 46, 90), **{IDS: [1, 46, 90]}
    ),
    "nm-testing/random-weights-llama3.1.8b-2layer-eagle3": head(
        *LLAMA_8B, **SPECULATORS, layers=2
    ),
    "inference-optimization/Mistral3_speculator_dummy": head(
        61, 7168, 14336, 32, 8, 192, 131072, 32000, **SPECULATORS
    ),
    "RedHatAI/Qwen3-8B-speculator.peagle": head(
        *QWEN3_8B,
        **QWEN_SPECULATORS,
        layers=4,
        aux=5,
        taps=(2, 10, 18, 26, 34),
        mask_token_id=151669,
        speculators_model_type="peagle",
        **{IDS: [2, 10, 18, 26, 34]},
        fields={"mask_token_id": 151669, "num_layers": 4, "num_aux": 5},
    ),
    # 7.4 NVIDIA, AngelSlim, DeepSpec and others
    "nvidia/gpt-oss-120b-Eagle3": head(
        36, 2880, 17280, 64, 8, 64, 201088, None, lacks=("lm_head",)
    ),
    "nvidia/gpt-oss-120b-Eagle3-v2": head(*GPT_120B, **nested_ids(1, 17, 32)),
    "nvidia/gpt-oss-120b-Eagle3-v3": head(
        *GPT_120B,
        taps=(24, 30, 36),
        eagle_config={IDS: [24, 30, 36], "norm_before_fc": True},
        fields={"pre_fc_norm": "concat"},
    ),
    "nvidia/gpt-oss-120b-Eagle3-long-context": head(*GPT_120B, **nested_ids(1, 17, 32)),
    "nvidia/gpt-oss-120b-Eagle3-short-context": head(
        *GPT_120B, taps=None, lacks=("fc",), eagle_config={"use_aux_hidden_state": False}
    ),
    "nvidia/gpt-oss-120b-Eagle3-throughput": head(
        *GPT_120B, taps=None, lacks=("fc",), eagle_config={"use_aux_hidden_state": False}
    ),
    "nvidia/Llama-3.3-70B-Instruct-Eagle3": head(*LLAMA_70B, **nested_ids(1, 39, 76)),
    "nvidia/Llama-4-Maverick-17B-128E-Eagle3": head(*MAVERICK, **nested_ids(1, 23, 44)),
    "AngelSlim/Qwen3-1.7B_eagle3": head(28, 2048, 6144, 16, 8, 128, 151936, 32000),
    "AngelSlim/Qwen3-4B_eagle3": head(36, 2560, 9728, 32, 8, 128, 151936, 32000),
    "AngelSlim/Qwen3-8B_eagle3": head(*QWEN3_8B),
    "AngelSlim/Qwen3-14B_eagle3": head(*QWEN3_14B),
    "AngelSlim/Qwen3-32B_eagle3": head(*QWEN3_32B),
    "AngelSlim/Qwen3-a3B_eagle3": head(48, 2048, 6144, 32, 4, 128, 151936, 32000),
    "AngelSlim Hunyuan-1.8B": head(32, 2048, 6144, 16, 4, 128, 120818, 32000),
    "AngelSlim Hunyuan-4B": head(36, 3072, 8192, 32, 8, 128, 120818, 32000),
    "AngelSlim Hunyuan-7B": head(32, 4096, 14336, 32, 8, 128, 128167, 32000),
    "AngelSlim Qwen3-VL": head(
        36,
        4096,
        12288,
        32,
        8,
        128,
        151936,
        32000,
        rope_scaling={"mrope_interleaved": True, "mrope_section": [24, 20, 20], "type": "mrope"},
    ),
    "AngelSlim Fun-CosyVoice3": head(24, 896, 4864, 14, 2, 64, 6761, 6761),
    "deepseek-ai/eagle3_qwen3_4b_ttt7": head(
        36, 2560, 9728, 32, 8, 128, 151936, None, **FIVE, extra=QK_NORM
    ),
    "deepseek-ai/eagle3_qwen3_8b_ttt7": head(
        36, 4096, 12288, 32, 8, 128, 151936, None, **FIVE, extra=QK_NORM
    ),
    "deepseek-ai/eagle3_qwen3_14b_ttt7": head(
        40,
        5120,
        17408,
        40,
        8,
        128,
        151936,
        None,
        aux=5,
        target_layer_ids=[1, 10, 19, 28, 37],
        taps=(2, 11, 20, 29, 38),
        extra=QK_NORM,
    ),
    "deepseek-ai/eagle3_gemma4_12b_ttt7": head(
        48,
        3840,
        15360,
        16,
        1,
        512,
        262144,
        None,
        architectures=["Gemma4Eagle3Model"],
        aux=5,
        target_layer_ids=[5, 17, 29, 41, 46],
        taps=(6, 18, 30, 42, 47),
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        final_logit_softcapping=30.0,
        hidden_activation="gelu_pytorch_tanh",
        rope_parameters={
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 1e6,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        lacks=("self_attn.v_proj",),
        extra={
            "self_attn.q_norm": (512,),
            "self_attn.k_norm": (512,),
            "pre_feedforward_layernorm": (3840,),
            "post_feedforward_layernorm": (3840,),
            "layer_scalar": (1,),
        },
        fields={
            "values": "keys",
            "softmax_scale": 1.0,
            "logit_softcap": 30.0,
            "branch_norms": True,
            "layer_scalar": True,
            "embed_scale": 3840**0.5,
        },
    ),
    "NeMo Automodel Gemma-4-E4B": head(
        42,
        2560,
        10240,
        8,
        2,
        256,
        262144,
        32000,
        architectures=["LlamaEagle3DraftModel"],
        hidden_activation="gelu_pytorch_tanh",
        rope_theta=1e6,
        num_hidden_layers=42,
    ),
    "amazon/GPT-OSS-20B-P-EAGLE": head(
        *GPT_20B, layers=4, ptd_token_id=201087, architectures=["PeagleLlamaForCausalLM"]
    ),
    "amazon/gpt-oss-120b-p-eagle": head(
        *GPT_120B, layers=4, pard_token=200020, architectures=["PeagleLlamaForCausalLM"]
    ),
    # Further templates, read when everything above resolved
    "template gemma3-27b": head(
        62,
        5376,
        21504,
        32,
        16,
        128,
        262208,
        262208,
        **nested_ids(1, 29, 61),
        taps=(2, 30, 62),
        lacks=("lm_head",),
        rope_theta=1e6,
        sliding_window=512,
        use_sliding_window=False,
        target_model_type="gemma3_text",
        additional_fc=False,
        reuse_target_lm_head=True,
        fields={"sliding_window": None, "lm_head_source": "target"},
    ),
    "template gemma4-26b-a4b": head(
        30, 2816, 2112, 32, 8, 128, 262144, 262144, **nested_ids(5, 17, 29), taps=(6, 18, 30)
    ),
    "template mistral-small-24b": head(
        40, 5120, 32768, 32, 8, 128, 131072, 32000, rope_theta=1e8, rms_norm_eps=1e-5
    ),
    "template qwen3-omni": head(48, 2048, 6144, 32, 4, 64, 152064, 32000, unsaid=("head_dim",)),
    "template llava": head(
        32, 4096, 11008, 32, 32, 128, 32064, 6024, unsaid=("head_dim",), rope_scaling=None
    ),
    "template phi4-mini": head(
        32,
        3072,
        8192,
        24,
        8,
        128,
        200064,
        32000,
        model_type="phi3",
        tie_word_embeddings=True,
        unsaid=("head_dim",),
        fields={"head_dim": 128, "lm_head_source": "file"},
    ),
    "template minicpm-v4": head(
        32,
        2560,
        10240,
        32,
        2,
        128,
        73448,
        32000,
        target_hidden_size=2560,
        max_position_embeddings=32768,
        rope_scaling={
            "rope_type": "longrope",
            "factor": 1.0,
            "original_max_position_embeddings": 32768,
            "long_factor": [1 + 0.45 * i for i in range(64)],
            "short_factor": [1 + 0.45 * i for i in range(64)],
        },
    ),
    "template qwen3.5-4b": head(32, 2560, 9216, 16, 4, 256, 248320, 32000, rope_theta=1e7),
    "template qwen3-vl-30b-a3b": head(
        48, 2048, 12288, 32, 4, 128, 151936, 32000, **nested_ids(1, 23, 44), taps=(2, 24, 45)
    ),
    "AngelSlim Qwen3-VL-4B": head(
        36,
        2560,
        9728,
        32,
        8,
        128,
        151936,
        32000,
        tie_word_embeddings=True,
        rope_theta=5e6,
        rope_scaling={
            "type": "default",
            "rope_type": "default",
            "mrope_interleaved": True,
            "mrope_section": [24, 20, 20],
        },
    ),
    "AngelSlim Qwen2.5-3B": head(
        36,
        2048,
        11008,
        16,
        2,
        128,
        151936,
        32000,
        tie_word_embeddings=True,
        rope_theta=1e6,
        sliding_window=32768,
        use_sliding_window=False,
        max_window_layers=36,
        unsaid=("head_dim",),
        fields={"sliding_window": None, "head_dim": 128},
    ),
    "NeMo Automodel gpt-oss": head(
        *GPT_20B,
        architectures=["LlamaEagle3DraftModel"],
        rope_theta=150000.0,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
    ),
    "nm-testing/EAGLE3-LLaMA3.1-Instruct-8B-converted": head(
        *LLAMA_8B, nested="llama", norm_before_residual=False
    ),
    "nm-testing/for_testing_gptoss20b_spec_eagle3": head(
        24, 2880, 2880, 64, 8, 64, 201088, 32000, **SPECULATORS, rope_theta=5e5
    ),
}


EAGLE_1 = {
    "yuhuili/EAGLE-LLaMA3-Instruct-8B": (32, 4096, 14336, 32, 8, 128256, {}),
    "yuhuili/EAGLE-Vicuna-7B-v1.3": (32, 4096, 11008, 32, 32, 32000, {"bias": False}),
    "yuhuili/EAGLE-mixtral-instruct-8x7B": (32, 4096, 14336, 32, 8, 32000, {"rope_theta": 1e6}),
    "yuhuili/EAGLE-Qwen2-7B-Instruct": (28, 3584, 18944, 28, 4, 152064, {"qkv_bias": True}),
}
"""EAGLE-1 and 2: depth, hidden size, MLP, heads, key heads, vocabulary, and other keys."""


MISTRAL_LARGE = {
    "dim": 7168,
    "n_layers": 2,
    "head_dim": 192,
    "hidden_dim": 16384,
    "n_heads": 128,
    "n_kv_heads": 128,
    "norm_eps": 1e-6,
    "vocab_size": 131072,
    "rope_theta": 10000.0,
    "max_position_embeddings": 294912,
    **LATENT,
    "llama_4_scaling": {"original_max_position_embeddings": 8192, "beta": 0.1},
    "yarn": {
        "original_max_position_embeddings": 8192,
        "factor": 36,
        "apply_scale": False,
        "beta": 32,
        "alpha": 1,
    },
    "quantization": {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"},
}
MISTRAL_SMALL = {
    "dim": 4096,
    "n_layers": 2,
    "head_dim": 128,
    "hidden_dim": 12288,
    "n_heads": 32,
    "n_kv_heads": 32,
    "norm_eps": 1e-6,
    "vocab_size": 131072,
    "rope_theta": 10000.0,
    "q_lora_rank": 1024,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
MISTRAL_MEDIUM = {
    "dim": 12288,
    "n_layers": 2,
    "head_dim": 128,
    "hidden_dim": 28672,
    "n_heads": 96,
    "n_kv_heads": 8,
    "norm_eps": 1e-5,
    "vocab_size": 131072,
    "rope_theta": 1e6,
}

MISTRAL = {
    "mistralai/Mistral-Large-3-675B-Instruct-2512-Eagle": (61, MISTRAL_LARGE),
    "mistralai/Mistral-Small-4-119B-2603-eagle": (36, MISTRAL_SMALL),
    "mistralai/Mistral-Medium-3.5-128B-EAGLE": (88, MISTRAL_MEDIUM),
}
"""Depth of the target, and ``params.json``: the target's own but for the number of layers."""

NO_PAGE = "its page states no sizes, and no config of it was found"
NOT_FOUND = {
    "LiquidAI/LFM2.5-24B-A2B-DSpark": "neither it nor its target is on any page that was found",
    "AQ-MedAI/Qwen3.5-397B-A17B-eagle3": NO_PAGE,
    "Nanbeige/Nanbeige4.2-3B-DSpark": NO_PAGE,
    "RedHatAI/Mellum2-12B-A2.5B-Thinking-speculator.dflash": NO_PAGE,
    "RedHatAI/Mistral-Small-4-119B-2603-speculator.dspark": NO_PAGE,
    "RedHatAI/Mistral-Small-4-119B-2603.dflash": NO_PAGE,
    "RedHatAI/Qwen3-4B-speculator.dspark": NO_PAGE,
    "RedHatAI/Qwen3-8B-speculator.dflash": NO_PAGE,
    "RedHatAI/Qwen3-8B-speculator.dflash2": NO_PAGE,
    "RedHatAI/gemma-4-31B-it-speculator.dflash": NO_PAGE,
    "RedHatAI/gemma-4-31B-it-speculator.dspark": NO_PAGE,
    "mlx-community/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-DSpark-bf16": NO_PAGE,
    "stanleyphoong/Ornith-1.0-9B-DSpark": NO_PAGE,
}
"""Drafters of the table that have no row of sizes, and why."""
