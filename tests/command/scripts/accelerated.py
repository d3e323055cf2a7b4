"""Halves the batch until it fits, as accelerate does."""

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import find_executable_batch_size
from transformers import LlamaConfig, LlamaForCausalLM

accelerator = Accelerator(cpu=True)
config = LlamaConfig(
    vocab_size=2000,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
)


def train(batch):
    print("batch", batch)
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    ids = torch.ones(batch, 256, dtype=torch.long)
    output = model(input_ids=ids, labels=ids)
    accelerator.backward(output.loss)
    optimizer.step()


if sys.argv[2] == "search":
    find_executable_batch_size(train, starting_batch_size=int(sys.argv[1]))()
else:
    train(int(sys.argv[1]))
print("trained")
