"""Solutions of the exercises, as the notebooks show them folded."""

import torch
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_

from membudget import accumulation


def weights(counts):
    total = sum(counts)
    return [count / total for count in counts]


def token_weights(labels, micro_batches):
    counts = [(labels[part] != -100).sum() for part in micro_batches]
    return [float(count / sum(counts)) for count in counts]


def accumulate(model, x, y, micro_batch):
    for start in range(0, len(x), micro_batch):
        part = slice(start, start + micro_batch)
        loss = F.cross_entropy(model(x[part]), y[part])
        (loss * len(x[part]) / len(x)).backward()


def amp_step(model, optimizer, scaler, micro_batches, max_norm):
    total = sum(len(x) for x, _ in micro_batches)
    for x, y in micro_batches:
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(model(x), y) * len(x) / total
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def mean_of_means_error(counts):
    total = sum(counts)
    terms = [(1 / len(counts) - n / total) ** 2 / n for n in counts]
    return (total * sum(terms)) ** 0.5


def noise_scale(micro_square, batch_square, micro_batch, batch):
    square = batch * batch_square - micro_batch * micro_square
    square /= batch - micro_batch
    variance = micro_square - batch_square
    variance /= 1 / micro_batch - 1 / batch
    return variance / square


def largest_micro_batch(peak, budget, global_batch):
    if peak(1) > budget:
        raise ValueError("not even one sample fits")
    fits, fails = 1, global_batch + 1
    while fails - fits > 1:
        middle = (fits + fails) // 2
        if peak(middle) <= budget:
            fits = middle
        else:
            fails = middle
    return fits


def padded_gradient(model, micro_batches):
    total = sum((labels != -100).sum() for _, labels in micro_batches)
    for tokens, labels in micro_batches:
        logits = model(tokens).flatten(0, 1)
        loss = F.cross_entropy(logits, labels.flatten(), reduction="sum")
        (loss / total).backward()


def train_epoch(model, optimizer, loader, steps):
    for window in accumulation.windows(loader, steps):
        total = sum(len(x) for x, _ in window)
        for x, y in window:
            loss = F.cross_entropy(model(x), y)
            (loss * len(x) / total).backward()
        optimizer.step()
        optimizer.zero_grad()


def clipped_step(model, optimizer, micro_batches, max_norm):
    total = sum(len(x) for x, _ in micro_batches)
    for x, y in micro_batches:
        loss = F.cross_entropy(model(x), y)
        (loss * len(x) / total).backward()
    clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    optimizer.zero_grad()
