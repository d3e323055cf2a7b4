"""Public models: what their ``config.json`` says, and how many numbers the
hub counts in their files.

The entries stand at ``https://huggingface.co/NAME/blob/main/config.json``, the
count at ``https://huggingface.co/api/models/NAME`` as ``safetensors.total``.
GPT-2's files hold masks, too: its counts are those of Keras Hub,
``keras_hub/src/models/gpt2/gpt2_presets.py``. Pythia's files hold masks, too:
its counts and sizes are those of the table on its model cards,
``https://huggingface.co/EleutherAI/pythia-12b``, and the vocabulary is what
its two counts imply, with the embeddings and without.
"""

ENTRIES = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "tie_word_embeddings",
)
TABLE = """
meta-llama/Llama-2-7b-hf llama 32000 4096 11008 32 32 32 - no 6738417664
meta-llama/Llama-2-13b-hf llama 32000 5120 13824 40 40 40 - no 13015866880
meta-llama/Llama-2-70b-hf llama 32000 8192 28672 80 64 8 - no 68976653312
meta-llama/Llama-3.1-8B llama 128256 4096 14336 32 32 8 - no 8030261248
meta-llama/Llama-3.1-70B llama 128256 8192 28672 80 64 8 - no 70553706496
meta-llama/Llama-3.1-405B llama 128256 16384 53248 126 128 8 - no 405853388800
meta-llama/Llama-3.2-1B llama 128256 2048 8192 16 32 8 64 yes 1235814400
meta-llama/Llama-3.2-3B llama 128256 3072 8192 28 24 8 128 yes 3212749824
TinyLlama/TinyLlama_v1.1 llama 32000 2048 5632 22 32 4 - no 1100048384
HuggingFaceTB/SmolLM2-135M llama 49152 576 1536 30 9 3 - yes 134515008
HuggingFaceTB/SmolLM2-360M llama 49152 960 2560 32 15 5 - yes 361821120
HuggingFaceTB/SmolLM2-1.7B llama 49152 2048 8192 24 32 32 - yes 1711376384
01-ai/Yi-6B llama 64000 4096 11008 32 32 4 - no 6061035520
deepseek-ai/deepseek-coder-6.7b-base llama 32256 4096 11008 32 32 32 - no 6740512768
mistralai/Mistral-7B-v0.1 mistral 32000 4096 14336 32 32 8 - no 7241732096
mistralai/Mistral-7B-v0.3 mistral 32768 4096 14336 32 32 8 - no 7248023552
mistralai/Ministral-8B-Instruct-2410 mistral 131072 4096 12288 36 32 8 128 no 8019808256
mistralai/Mistral-Nemo-Base-2407 mistral 131072 5120 14336 40 32 8 128 no 12247782400
mistralai/Mistral-Small-24B-Base-2501 mistral 131072 5120 32768 40 32 8 128 no 23572403200
microsoft/Phi-3-mini-4k-instruct phi3 32064 3072 8192 32 32 32 - no 3821079552
microsoft/Phi-4-mini-instruct phi3 200064 3072 8192 32 24 8 - yes 3836021760
microsoft/phi-4 phi3 100352 5120 17920 40 40 10 - no 14659507200
Qwen/Qwen2.5-0.5B qwen2 151936 896 4864 24 14 2 - yes 494032768
Qwen/Qwen2.5-1.5B qwen2 151936 1536 8960 28 12 2 - yes 1543714304
Qwen/Qwen2.5-3B qwen2 151936 2048 11008 36 16 2 - yes 3085938688
Qwen/Qwen2.5-7B qwen2 152064 3584 18944 28 28 4 - no 7615616512
Qwen/Qwen2.5-14B qwen2 152064 5120 13824 48 40 8 - no 14770033664
Qwen/Qwen2.5-32B qwen2 152064 5120 27648 64 40 8 - no 32763876352
Qwen/Qwen2.5-72B qwen2 152064 8192 29568 80 64 8 - no 72706203648
Qwen/Qwen3-0.6B qwen3 151936 1024 3072 28 16 8 128 yes 751632384
Qwen/Qwen3-1.7B qwen3 151936 2048 6144 28 16 8 128 yes 2031739904
Qwen/Qwen3-4B qwen3 151936 2560 9728 36 32 8 128 yes 4022468096
Qwen/Qwen3-8B qwen3 151936 4096 12288 36 32 8 128 no 8190735360
Qwen/Qwen3-14B qwen3 151936 5120 17408 40 40 8 128 no 14768307200
google/gemma-2-2b gemma2 256000 2304 9216 26 8 4 256 - 2614341888
google/gemma-2-9b gemma2 256000 3584 14336 42 16 8 256 - 9241705984
google/gemma-2-27b gemma2 256000 4608 36864 46 32 16 128 - 27227128320
google/gemma-3-270m gemma3_text 262144 640 2048 18 4 1 256 - 268098176
google/gemma-3-1b-pt gemma3_text 262144 1152 6912 26 4 1 256 - 999885952
allenai/OLMo-2-1124-7B olmo2 100352 4096 11008 32 32 32 - no 7298617344
allenai/OLMo-2-1124-13B olmo2 100352 5120 13824 40 40 40 - no 13716198400
openai-community/gpt2 gpt2 50257 768 - 12 12 - - - 124439808
openai-community/gpt2-medium gpt2 50257 1024 - 24 16 - - - 354823168
openai-community/gpt2-large gpt2 50257 1280 - 36 20 - - - 774030080
openai-community/gpt2-xl gpt2 50257 1600 - 48 25 - - - 1557611200
Qwen/Qwen3-32B qwen3 151936 5120 25600 64 64 8 128 no 32762123264
stabilityai/stablelm-3b-4e1t stablelm 50304 2560 6912 32 32 32 - no 2795443200
stabilityai/stablelm-2-1_6b stablelm 100352 2048 5632 24 32 32 - no 1644515328
EleutherAI/pythia-70m gpt_neox 50304 512 2048 6 8 - - no 70426624
EleutherAI/pythia-160m gpt_neox 50304 768 3072 12 12 - - no 162322944
EleutherAI/pythia-410m gpt_neox 50304 1024 4096 24 16 - - no 405334016
EleutherAI/pythia-1b gpt_neox 50304 2048 8192 16 8 - - no 1011781632
EleutherAI/pythia-1.4b gpt_neox 50304 2048 8192 24 16 - - no 1414647808
EleutherAI/pythia-2.8b gpt_neox 50304 2560 10240 32 32 - - no 2775208960
EleutherAI/pythia-6.9b gpt_neox 50432 4096 16384 32 32 - - no 6857302016
EleutherAI/pythia-12b gpt_neox 50688 5120 20480 36 40 - - no 11846072320
mistralai/Mixtral-8x7B-v0.1 mixtral 32000 4096 14336 32 32 8 - no 46702792704
allenai/OLMoE-1B-7B-0924 olmoe 50304 2048 1024 16 16 16 - no 6919161856
Qwen/Qwen3-30B-A3B qwen3_moe 151936 2048 768 48 32 4 128 no 30532122624
"""  # noqa: E501

MORE = {
    "stabilityai/stablelm-2-1_6b": {"use_qkv_bias": True},
    "mistralai/Mixtral-8x7B-v0.1": {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "allenai/OLMoE-1B-7B-0924": {"num_experts": 64, "num_experts_per_tok": 8},
    "Qwen/Qwen3-30B-A3B": {
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
    },
}
"""Entries that few have."""

NAMES = {
    "gpt2": {
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
    },
    "qwen3_moe": {"intermediate_size": "moe_intermediate_size"},
}
"""What a family's configs call an entry."""

BUFFERS = "meta-llama/Llama-2-"
"""Their files hold the speeds of the rotary positions, once for a block."""

TWICE = "Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B"
"""Their files hold the head, which is the token embedding, once more."""


def _entry(text: str):
    words = {"-": None, "yes": True, "no": False}
    return int(text) if text.isdecimal() else words.get(text, text)


def models() -> dict[str, tuple[dict, int]]:
    """By name: the entries of the config, and the numbers in the files."""
    found = {}
    for line in TABLE.strip().splitlines():
        name, *entries, count = line.split()
        config = dict(zip(ENTRIES, map(_entry, entries), strict=True))
        names = NAMES.get(config["model_type"], {})
        given = {
            names.get(k, k): v for k, v in config.items() if v is not None
        }
        found[name] = given | MORE.get(name, {}), int(count)
    return found
