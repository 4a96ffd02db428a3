"""The data of architectures.py: a tiny configuration for every model file of mlx-lm, and notes.

Knows what the config fields of mlx-lm's model files are called; imports nothing.
"""

VOCAB = 96
WINDOW = 8  # of sliding and chunked attention: shorter than prompt and text together

SLIDING, FULL = "sliding_attention", "full_attention"
ALTERNATING = [SLIDING, FULL] * 2

SIZES = {
    name: value
    for value, names in [
        # widths
        (64, "hidden_size d_model model_dim n_embd hidden_dim dim_model_base"),
        (96, "intermediate_size intermediate_size_mlp ffn_hidden_size"),
        (96, "ff_intermediate_size n_inner"),
        (192, "mlp_hidden_size"),
        (VOCAB, "vocab_size num_vocab embedding_size"),
        (4, "num_hidden_layers num_layers n_layers n_layer num_transformer_layers"),
        # attention
        (4, "num_attention_heads num_heads n_heads n_head"),
        (2, "num_key_value_heads num_kv_heads n_kv_heads"),
        (16, "head_dim kv_channels query_pre_attn_scalar"),
        (ALTERNATING, "layer_types"),
        (2, "sliding_window_pattern"),
        (WINDOW, "sliding_window window_size sliding_window_size"),
        (WINDOW, "attention_window_size attention_chunk_size"),
        (0.25, "attention_multiplier"),
        # multi-head latent attention and its indexer
        (32, "q_lora_rank"),
        (16, "kv_lora_rank v_head_dim index_head_dim"),
        (8, "qk_rope_head_dim qk_nope_head_dim index_topk"),
        (2, "index_n_heads"),
        # positions
        (2048, "max_position_embeddings n_positions n_ctx block_size model_max_length"),
        (10000, "rope_theta swa_rope_theta rotary_emb_base rope_local_base_freq"),
        (0.5, "partial_rotary_factor rotary_pct"),
        (8, "rotary_dim"),
        (None, "rope_scaling"),
        # norms
        (1e-5, "rms_norm_eps norm_eps layer_norm_eps layer_norm_epsilon layernorm_epsilon"),
        # experts
        (4, "num_experts num_local_experts n_routed_experts moe_num_experts"),
        (2, "num_experts_per_tok num_experts_per_token moe_topk moe_top_k moe_k"),
        (1, "n_shared_experts num_shared_experts num_shared_expert moe_num_shared_experts"),
        (32, "moe_intermediate_size expert_ffn_hidden_size share_expert_dim"),
        (32, "shared_intermediate_size shared_expert_intermediate_size"),
        (32, "moe_shared_expert_intermediate_size"),
        (1, "first_k_dense_replace num_dense_layers moe_layer_freq decoder_sparse_step"),
        (1, "n_group topk_group zero_expert_num"),
        ([], "mlp_only_layers"),
        ("noaux_tc", "topk_method"),
        ("sigmoid", "scoring_func"),
        ("identity", "zero_expert_type"),
        # recurrent layers
        (2, "layer_group_size full_attention_interval"),
        (1, "group_norm_size n_groups mamba_n_groups"),
        (4, "linear_num_value_heads mamba_num_heads mamba_n_heads"),
        (2, "linear_num_key_heads mamba_expand conv_window"),
        (16, "linear_value_head_dim mamba_head_dim mamba_d_head"),
        (32, "linear_key_head_dim"),  # mlx-lm's kernels for a GPU take multiples of 32
        (32, "state_size ssm_state_size mamba_d_state"),
        (4, "linear_conv_kernel_dim conv_kernel conv1d_width mamba_d_conv"),
        (3, "conv_L_cache"),
        (8, "time_step_rank"),
        ([0.001, 100.0], "time_step_limit"),
        # switches, multipliers, and what else a config must say
        (True, "conv_bias use_conv_bias mamba_conv_bias linear_allow_neg_eigval"),
        (True, "use_qk_norm norm_topk_prob"),
        (False, "attention_bias mlp_bias use_bias use_qkv_bias mamba_proj_bias"),
        (False, "tie_word_embeddings"),
        (1.0, "routed_scaling_factor embedding_multiplier residual_multiplier"),
        (1.0, "logits_scaling scale_emb"),
        (1.4, "scale_depth"),
        ("silu", "hidden_act"),
    ]
    for name in names.split()
}
"""Tiny values by field name; a config takes those that its ModelArgs has."""

RECURRENT_THEN_FULL = ["linear_attention", "full_attention"] * 2
KIMI_DELTA = {
    "kda_layers": [1, 2, 3],
    "full_attn_layers": [4],
    "num_heads": 4,
    "head_dim": 32,
    "short_conv_kernel_size": 4,
}
ROPE_PARAMETERS = {"rope_type": "default", "rope_theta": 10000.0}
LLAMA4_ROPE = {
    **ROPE_PARAMETERS,
    "llama_4_scaling_beta": 0.1,
    "original_max_position_embeddings": WINDOW,
}
ROPE_BY_LAYER_TYPE = {
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    FULL: {"rope_type": "default", "rope_theta": 500000.0},
}

GEMMA4_LARGE = {
    # As published, but for sizes: five sliding layers to a full one, keys that are also the
    # values, neither shared layers nor inputs per layer.
    "num_hidden_layers": 6,
    "layer_types": [SLIDING] * 5 + [FULL],
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_global_key_value_heads": 1,
    "head_dim": 16,
    "global_head_dim": 32,
    "attention_k_eq_v": True,
    "use_double_wide_mlp": False,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "tie_word_embeddings": True,
}

OVERRIDES = {
    # Where the common values do not fit a file, or would leave its machinery unused. None
    # is passed on.
    "afm7": {"num_kv_reuse_layers": 2},
    "apertus": {"post_norm": True, "qk_norm": True},
    "baichuan_m1": {"sliding_window_layers": [0, 2], "num_hidden_layers": 4},
    "bailing_moe_linear": {"num_key_value_heads": 4},
    "bailing_moe_v3": {"head_dim": 32},
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    },
    "deepseek_v2": {
        "topk_method": "greedy",
        "rope_scaling": {"type": "yarn", "factor": 2.0, "mscale_all_dim": 1.0},
    },
    "deepseek_v41": {
        "head_dim": 32,
        "index_head_dim": 32,
        "o_groups": 2,
        "o_lora_rank": 16,
        "scoring_func": "sqrtsoftplus",
        "rms_norm_eps": 1e-20,
        "compress_ratios": [0, 2, 2, 2],
        "kv_source_layer_ids": [1],
        "index_source_layer_ids": [1, 2],
        "candidate_source_layer_id": 1,
        "candidate_topk_blocks": 2,
        "candidate_block_size": 2,
        "index_topk": 4,
        "hc_mult": 2,
    },
    "exaone4": {"sliding_window_pattern": "LG"},
    "exaone_moe": {"is_moe_layer": [False, True, True, True]},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma4 (26B-A4B)": {
        **GEMMA4_LARGE,
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 2,
        "num_global_key_value_heads": 2,
    },
    "gemma4 (31B)": GEMMA4_LARGE,
    "gear": {"layer_types": ["conv_mixer", SLIDING, "conv_mixer", FULL]},
    "gemma3n": {
        "layer_types": [*ALTERNATING, SLIDING, FULL],
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": VOCAB,
        "final_logit_softcapping": 30.0,
        "activation_sparsity_pattern": [0.5, 0.5, 0, 0, 0, 0],
        "hidden_size_per_layer_input": 8,
        "altup_num_inputs": 3,
        "altup_coef_clip": 120.0,
        "altup_correct_scale": True,
        "altup_active_idx": 0,
        "laurel_rank": 8,
    },
    "gemma4_text": {
        "layer_types": [*ALTERNATING, SLIDING, FULL],
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "global_head_dim": 32,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 8,
    },
    "glm_moe_dsa": {"rope_parameters": ROPE_PARAMETERS},
    "gpt_oss (20b)": {
        # As published, but for sizes.
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "num_local_experts": 8,
        "num_experts_per_tok": 4,
        "rope_theta": 150000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
    },
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "gptj": {"rotary_dim": 8},
    "hunyuan": {
        "use_mixed_mlp_moe": True,
        "use_cla": True,
        "cla_share_factor": 2,
        "rope_scaling": {"alpha": 2.0, "factor": 1.0, "type": "dynamic"},
    },
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
    },
    "kimi_k3": {
        "linear_attn_config": KIMI_DELTA,
        "attn_res_block_size": 2,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
    },
    "kimi_linear": {"linear_attn_config": KIMI_DELTA},
    "lfm2": {
        "layer_types": None,
        "full_attn_idxs": [1, 3],
        "block_dim": 64,
        "block_ff_dim": 96,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
    },
    "lfm2_moe": {"layer_types": None, "full_attn_idxs": [1, 3], "use_expert_bias": True},
    "llama": {"layer_types": None},
    "llama (sliding window)": {"layer_types": ALTERNATING},
    "longcat_flash": {
        "attention_method": "MLA",
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
    },
    "longcat_flash_ngram": {
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        "ngram_vocab_size_ratio": 2,
    },
    "llama4_text": {"no_rope_layers": [1, 1, 1, 0]},
    "llama4": {"interleave_moe_layer_step": 2, "num_experts_per_tok": 1},
    "mamba": {"intermediate_size": 128},
    "mellum": {"rope_parameters": ROPE_BY_LAYER_TYPE},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [1, 0, 1, 0],
        "moe_layer_freq": [0, 1, 1, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 16,
        "swa_v_head_dim": 16,
    },
    "minicpm3": {"rope_scaling": {"type": "longrope"}},
    "minimax_m3_vl": {
        "dense_intermediate_size": 96,
        "moe_layer_freq": [0, 1, 1, 1],
        "layer_types": ["full_attention", "sparse", "sparse", "full_attention"],
        "index_block_size": 4,
        "index_topk_blocks": 2,
    },
    "ministral3": {"rope_parameters": LLAMA4_ROPE},
    "mistral4": {"rope_parameters": LLAMA4_ROPE},
    "muse_glimmer": {"output_multiplier": 1.0},
    "muse_spark": {
        "post_norm_eps": 1e-8,
        "rope_parameters": ROPE_PARAMETERS,
        "layer_rope_theta": [10000.0, 0.0, 10000.0, 0.0],
        "final_logit_softcapping": 20.0,
        "output_multiplier": 1.0,
        "moe_hidden_size": 32,
        "num_shared_experts": 0,
    },
    "nanbeige (two loops)": {"num_loops": 2},
    "nemotron": {"hidden_act": "relu2"},
    "nemotron_h": {
        "layer_types": None,
        "hybrid_override_pattern": list("M*EM-*"),
        "intermediate_size": 96,
    },
    "nemotron-nas": {
        "block_configs": [
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.5}},
            {"attention": {"replace_with_linear": True}, "ffn": {"ffn_mult": 1.5}},
            {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.5}},
            {"attention": {"n_heads_in_group": 2}, "ffn": {"no_op": True}},
        ]
    },
    "olmo_hybrid": {"layer_types": RECURRENT_THEN_FULL},
    "openelm": {
        "num_query_heads": [4, 4, 4, 4],
        "num_kv_heads": [2, 2, 2, 2],
        "ffn_dim_divisor": 8,
        "ffn_multipliers": [1.0, 1.5, 2.0, 2.0],
    },
    "phi3small": {
        "dense_attention_every_n_layers": 2,
        "gegelu_limit": 20.0,
        "hidden_size": 32,
        "vocab_size": 100352,  # it writes to the logits of tokens up to there, unchecked
    },
    "plamo": {"n_shared_head": 2},
    "prism_hadamard_qwen35": {"num_experts": 0, "intermediate_size": 512},
    "qwen3_5": {"num_experts": 0},
    "qwen3_5_moe": {"num_experts": 4},
    "qwen3_next": {"linear_key_head_dim": 128},  # as published: it has a kernel of its own
    "recurrent_gemma": {
        "logits_soft_cap": 30.0,
        "block_types": ["recurrent", "attention"],
    },
    "rwkv7": {
        "head_dim": 32,
        "a_low_rank_dim": 8,
        "v_low_rank_dim": 8,
        "gate_low_rank_dim": 8,
        "decay_low_rank_dim": 8,
    },
    "smollm3": {"layer_types": None},
    "spark2_5": {"hidden_act": "gelu", "rope_parameters": ROPE_BY_LAYER_TYPE},
    "step3p5": {"num_attention_groups": 2},
}

TOP_LEVEL = {
    # Fields of the outer config, where text_config is not all.
    "prism_hadamard_qwen35": {
        "tensor_namespace": "mlx-vlm-qwen3_5",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": [
            {
                "path": f"model.layers.{i}.mlp.down_proj",
                "embedding": False,
                "dtype": "float16",
                "block": 512,
            }
            for i in range(4)
        ],
    },
}

WRAPPED = {
    # Files whose text_config is another file's config.
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "lfm2-vl": "lfm2",
    "mistral3": "ministral3",
    "pixtral": "llama",
    "qwen2_vl": "qwen2",
    "prism_hadamard_qwen35": "qwen3_5",
    "qwen3_5_moe": "qwen3_5",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
}

TWO_WAYS = ("falcon_h1", "granitemoehybrid", "kimi_k3", "mamba2", "nemotron_h", "plamo2")
"""What mlx-lm computes in one way for a row and in another for several, on Metal alone."""

SEEDS = {"apertus": 4, "gptj": 1, "phi": 2, "plamo3": 1, "starcoder2": 3, "talkie": 4}
"""Where the seed 0 gives a text without life."""

NOTES = {
    # What a reader should know, whatever the measurement says.
    "bitnet": "measured with its Metal kernel's product done in plain operations",
    "deepseek_v41": "several residual streams side by side (hyper-connections)",
    "gemma3n": "several residual streams side by side (AltUp)",
    "iquestloopcoder": "it runs the parts of its layers, twice, and never a layer",
    "kimi_k3": "a tap is the running sum of a block of layers, not the whole residual stream",
    "muse_spark": "measured with its Metal kernels done in plain operations",
    "nanbeige (two loops)": "it runs its layers twice; a tap shows the second time",
    "olmo": "it adds a mask that is the word causal; measured without the ai2-olmo package, which "
    "mlx-lm asks for and does not use",
    "phi3small": "its block-sparse layers add a mask of truth values, so that rows see later rows",
    "plamo3": "several rows see a window one longer than one row does",
    "talkie": "its layers take the embeddings first and the residual stream second",
}

RECURRENT = (
    "baichuan_m1", "bailing_hybrid", "bailing_moe_linear", "bailing_moe_v3", "falcon_h1", "gear",
    "granitemoehybrid", "jamba", "kimi_k3", "kimi_linear", "lfm2", "lfm2-vl", "lfm2_moe",
    "longcat_flash_ngram", "mamba", "mamba2", "nemotron_h", "olmo_hybrid", "plamo2",
    "prism_hadamard_qwen35", "qwen3_5", "qwen3_5_moe", "qwen3_next", "recurrent_gemma", "rwkv7",
)  # fmt: skip
"""Every architecture of mlx-lm that keeps recurrent states."""

WINDOWED = (
    "afmoe", "baichuan_m1", "cohere2", "exaone4", "exaone_moe", "gear", "gemma3", "gemma3_text",
    "gemma3n", "gemma4", "gemma4 (26B-A4B)", "gemma4 (31B)", "gemma4_text", "gpt_oss",
    "gpt_oss (20b)", "iquestloopcoder", "laguna", "llama (sliding window)", "mellum",
    "mimo_v2_flash", "ministral3", "muse_glimmer", "muse_spark", "olmo3", "plamo3",
    "recurrent_gemma", "spark2_5", "step3p5",
)  # fmt: skip
"""Every architecture of mlx-lm with caches that keep a window."""
