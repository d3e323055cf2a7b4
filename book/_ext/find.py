"""What people type into a search, and the page that answers it.

Sphinx ranks pages by how often a word is on them. An entry of its index counts
more than any word, so each page has those that should find it first.
"""

from sphinx import addnodes

TYPED = {
    "book/your_script": [
        "QLoRA",
        "out of memory",
        "config.json",
        "Qwen",
        "Qwen2.5",
        "12 GB",
        "membudget",
        "pip install",
    ],
    "chapters/01_measuring": ["nvidia-smi", "reserved memory"],
    "chapters/01a_caching_allocator": [
        "fragmentation",
        "expandable_segments",
        "PYTORCH_CUDA_ALLOC_CONF",
        "empty_cache",
    ],
    "chapters/01b_when_it_runs_out": [
        "OOM",
        "out of memory",
        "CUDA out of memory",
        "torch.OutOfMemoryError",
        "memory leak",
    ],
    "chapters/02_ledger": ["flash attention"],
    "chapters/02b_five_calculators": ["calculator"],
    "chapters/03_accumulation": [
        "batch size",
        "gradient accumulation",
        "micro-batch",
    ],
    "chapters/04_checkpointing": [
        "gradient checkpointing",
        "activation checkpointing",
        "recomputation",
    ],
    "chapters/04b_what_to_keep": ["selective checkpointing"],
    "chapters/06_precision": [
        "bf16 T4",
        "T4 bf16",
        "mixed precision",
        "autocast",
        "AMP",
        "loss scale",
        "GradScaler",
    ],
    "chapters/06a_every_bit": ["fp8"],
    "chapters/07_adapters": [
        "LoRA",
        "QLoRA",
        "PEFT",
        "adapter",
        "fine-tuning",
    ],
    "chapters/07a_four_bits": ["NF4", "4-bit", "bitsandbytes"],
    "chapters/07b_which_optimizer": [
        "8-bit Adam",
        "Adafactor",
        "GaLore",
        "Lion",
        "Muon",
    ],
    "chapters/08_offloading": [
        "offload",
        "activation offloading",
        "save_on_cpu",
        "PCIe",
    ],
    "chapters/08a_the_loss": [
        "cross entropy",
        "chunked loss",
        "Liger",
        "logits",
    ],
    "chapters/08b_elsewhere": [
        "CPU offload",
        "ZeRO-Offload",
        "NVMe",
        "paged optimizer",
    ],
    "chapters/09_sharding": ["FSDP", "FSDP2", "DeepSpeed", "ZeRO", "DDP"],
    "chapters/10_parallelism": [
        "tensor parallel",
        "Megatron",
        "pipeline parallel",
        "1F1B",
        "GPipe",
    ],
    "chapters/10a_zero_bubble": ["zero bubble", "DualPipe", "interleaved"],
    "chapters/10b_long_sequences": [
        "context parallel",
        "ring attention",
        "Ulysses",
    ],
    "chapters/10c_experts": ["MoE", "expert parallel", "Mixtral"],
    "labs/lab7_adapters": ["fine-tune 8B", "merge adapter", "T4 QLoRA"],
}


ANSWERED = {typed.lower() for page in TYPED.values() for typed in page}


def entries_of(docname):
    """The entries of a page as Sphinx's index takes them."""
    return [(typed, "", "main") for typed in TYPED.get(docname, [])]


def keep(app, env):
    """Give pages that are not written again their entries, which Sphinx
    forgets."""
    for docname in TYPED:
        env._search_index_index_entries[docname] = entries_of(docname)


def add(app, doctree, docname):
    """Give a page its entries; the glossary's own would be as high."""
    for index in doctree.findall(addnodes.index):
        index["entries"] = [
            entry
            for entry in index["entries"]
            if entry[1].lower() not in ANSWERED
        ]
    if found := entries_of(docname):
        entries = [("single", *entry, None) for entry in found]
        doctree.insert(0, addnodes.index(entries=entries))
