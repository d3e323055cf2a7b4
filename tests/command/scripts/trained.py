"""Fine-tunes a tiny Llama with the Trainer; the argument is the batch."""

import sys
import tempfile

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

config = LlamaConfig(
    vocab_size=2000,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
)
rows = [{"input_ids": torch.arange(256) % 50} for _ in range(512)]
for row in rows:
    row["labels"] = row["input_ids"]

with tempfile.TemporaryDirectory() as folder:
    trainer = Trainer(
        LlamaForCausalLM(config),
        TrainingArguments(
            folder,
            per_device_train_batch_size=int(sys.argv[1]),
            max_steps=2,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=rows,
    )
    trainer.train()
print("trained")
