"""Model families by transformers `model_type`: those that are served, and why the others are refused.

Only data. A family is listed as served after a random model of it gave the logits of its own plain forward through
chunked prefill, a reused prefix and decode (`tests/unit/replicas/loading/test_families.py`).
"""

from __future__ import annotations

SERVED = frozenset(
    {
        "afmoe",
        "apertus",
        "arcee",
        "aria_text",
        "bitnet",
        "cohere",
        "cohere2",
        "cohere2_moe",
        "cwm",
        "dots1",
        "ernie4_5",
        "ernie4_5_moe",
        "exaone4",
        "exaone_moe",
        "flex_olmo",
        "flint",
        "gemma",
        "gemma2",
        "gemma3_text",
        "glm",
        "glm4",
        "glm4_moe",
        "gpt_neox",
        "gpt_oss",
        "granite",
        "granite_swa",
        "granitemoe",
        "granitemoe_swa",
        "granitemoeshared",
        "helium",
        "granitemoehybrid",  # of which the dense models have attention layers only
        "hunyuan_v1_dense",
        "hunyuan_v1_moe",
        "hy_v3",
        "hyperclovax",
        "internlm3",
        "jais2",
        "kolibri1",
        "llama",
        "minimax_m2",
        "ministral",
        "ministral3",
        "mistral",
        "mixtral",
        "nanochat",
        "olmo",
        "olmo2",
        "olmo3",
        "olmoe",
        "persimmon",
        "phi",
        "phi3",
        "phimoe",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "seed_oss",
        "smollm3",
        "solar_open",
        "starcoder2",
        "vaultgemma",
    }
)

RECURRENT = (
    "some of its layers are recurrent (linear attention, a state space or a convolution): their state sums up every "
    "token before, while warmkv caches, shares and compresses keys and values of single tokens"
)
LATENT = "its latent attention (MLA) has no keys and values per head for a cache, but a compressed latent of both"
SPARSE = "its layers choose the tokens that they attend to with an index or compressed blocks of their own"
CHUNKED = "its layers attend within chunks of fixed length, which warmkv does not compute"
SHARED = "some of its layers use the keys and values of other layers"
CONVOLVED = "it convolves queries, keys or values along the tokens before it attends, which needs the tokens before"
LOOPED = "it runs its layers several times for a token, each time with other keys and values"
OWN_ATTENTION = "its attention is computed by code of its own instead of the attention interface of transformers"
NO_KEYWORDS = "its layers do not pass keywords on to the attention interface of transformers"
OWN_MASK = "it changes attention weights by a mask or a difference of its own"
NOT_ROTARY = "its positions are learned, relative or ALiBi instead of rotary"
NOT_CAUSAL = "it is an encoder or needs one: its attention is not causal, or looks at a second sequence"

_FAMILIES: dict[str, str] = {
    RECURRENT: """bailing_hybrid bamba falcon_h1 falcon_mamba jamba kimi_linear lfm2 lfm2_moe lfm3 mamba mamba2 minimax
        nemotron_h olmo_hybrid qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next recurrent_gemma rwkv xlstm
        zamba zamba2""",
    LATENT: "axk1 deepseek_v2 deepseek_v3 glm4_moe_lite longcat_flash minicpm3 youtu",
    SPARSE: "axk2 deepseek_v32 deepseek_v4 glm_moe_dsa hy_v4",
    CHUNKED: "llama4 llama4_text",
    SHARED: "gemma3n gemma3n_text gemma4 gemma4_text",
    CONVOLVED: "zaya",
    LOOPED: "hrm_text",
    OWN_MASK: "diffllama doge",
    OWN_ATTENTION: "codegen dbrx falcon gpt_neox_japanese gptj jetmoe",
    NO_KEYWORDS: "nemotron stablelm",
    NOT_ROTARY: "biogpt bloom ctrl gpt2 gpt_bigcode gpt_neo mpt openai-gpt opt xglm",
    NOT_CAUSAL: """bart bert bert-generation big_bird bigbird_pegasus blenderbot blenderbot-small camembert electra
        ernie marian mbart megatron-bert mvp pegasus
        plbart prophetnet rembert roberta roformer t5 whisper xlm-roberta""",
}
REFUSED: dict[str, str] = {family: reason for reason, names in _FAMILIES.items() for family in names.split()}
"""`model_type` -> what about the family cannot be served."""
