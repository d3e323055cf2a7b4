"""What the reader is given: nothing yet, or a broken loop to repair."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_


def own_ledger():
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.rand(32, 64), torch.zeros(32, dtype=torch.long)
    guess = {"parameters": ..., "gradients": ...}
    guess["optimizer"] = ...
    guess["activations"] = ...
    return model, optimizer, cross_entropy, batch, guess


def cross_entropy(model, x, y):
    return F.cross_entropy(model(x), y)


def clipped_amp_step(model, optimizer, scaler, x, y, max_norm):
    with torch.autocast("cpu", torch.float16):
        loss = F.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def two_losses(model, optimizer, scaler, x, y):
    second = torch.amp.GradScaler("cpu")  # for the auxiliary loss
    with torch.autocast("cpu", torch.float16):
        logits = model(x)
        main = F.cross_entropy(logits, y)
        auxiliary = logits.float().square().mean()
    scaler.scale(main).backward(retain_graph=True)
    second.scale(auxiliary).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def backward_outside(model, optimizer, x, y):
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def best_epoch(losses):
    history = torch.stack(losses).half()
    return int(history.argmin())


def train_step(model, optimizer, scaler, x, y, dtype):
    with torch.autocast("cpu", dtype):
        loss = F.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
