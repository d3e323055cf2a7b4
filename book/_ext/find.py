"""What people type into a search, and the page that answers it.

Sphinx ranks pages by how often a word is on them. An entry of its index counts
more than any word, so each page has those that should find it first.
"""

import language
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

CHINESE = {
    "book/your_script": ["显存不够", "爆显存"],
    "chapters/01_measuring": ["显存占用", "峰值显存"],
    "chapters/01a_caching_allocator": ["显存碎片", "内存碎片", "碎片"],
    "chapters/01b_when_it_runs_out": ["显存不足", "显存溢出", "内存泄漏"],
    "chapters/02_ledger": ["内存账本", "显存计算"],
    "chapters/02b_five_calculators": ["计算器", "显存计算器"],
    "chapters/03_accumulation": ["梯度累积", "梯度累加", "批次大小", "微批次"],
    "chapters/04_checkpointing": [
        "激活检查点",
        "梯度检查点",
        "检查点",
        "重计算",
        "激活重计算",
    ],
    "chapters/04b_what_to_keep": ["选择性检查点", "选择性重计算"],
    "chapters/05_schedules": ["执行计划"],
    "chapters/06_precision": ["混合精度", "半精度", "损失缩放"],
    "chapters/07_adapters": ["适配器", "微调", "低秩适应"],
    "chapters/07a_four_bits": ["量化", "4 位"],
    "chapters/07b_which_optimizer": ["优化器", "8 位优化器"],
    "chapters/08_offloading": ["卸载", "激活卸载"],
    "chapters/08a_the_loss": ["交叉熵", "分块损失"],
    "chapters/08b_elsewhere": ["CPU 卸载", "优化器卸载"],
    "chapters/09_sharding": ["分片", "数据并行", "零冗余优化器"],
    "chapters/10_parallelism": ["张量并行", "流水线并行", "模型并行"],
    "chapters/10a_zero_bubble": ["零气泡"],
    "chapters/10b_long_sequences": ["上下文并行", "环形注意力", "长序列"],
    "chapters/10c_experts": ["混合专家", "专家并行"],
    "chapters/11_planning": ["规划", "规划器"],
}
"""What people type into the search of the Chinese pages, besides."""


def typed_on(docname):
    """What a page is to be found by."""
    own = language.language == language.CHINESE
    return TYPED.get(docname, []) + own * CHINESE.get(docname, [])


def answered():
    """What one of the pages answers."""
    pages = TYPED | CHINESE
    return {typed.lower() for page in pages for typed in typed_on(page)}


def entries_of(docname):
    """The entries of a page as Sphinx's index takes them."""
    return [(typed, "", "main") for typed in typed_on(docname)]


def keep(app, env):
    """Give pages that are not written again their entries, which Sphinx
    forgets."""
    for docname in TYPED | CHINESE:
        env._search_index_index_entries[docname] = entries_of(docname)


def add(app, doctree, docname):
    """Give a page its entries; the glossary's own would be as high."""
    elsewhere = answered()
    for index in doctree.findall(addnodes.index):
        index["entries"] = [
            entry
            for entry in index["entries"]
            if entry[1].lower().partition("（")[0] not in elsewhere
        ]
    if found := entries_of(docname):
        entries = [("single", *entry, None) for entry in found]
        doctree.insert(0, addnodes.index(entries=entries))
