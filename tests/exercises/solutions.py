"""Solutions of the exercises, as the notebooks show them folded."""

import gc

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


def train(model, optimizer, batches):
    losses = []
    for x, y in batches:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def predict_peak(batch, width, depth):
    activation = 4 * batch * width
    layer = 4 * (width * width + width)
    peak = 2 * activation + depth * layer  # in layer 1's backward
    for k in range(2, depth + 1):  # and in layer k's
        gradients = (depth - k + 1) * layer
        peak = max(peak, (k + 2) * activation + gradients)
    return depth * layer + peak


def alive_at_peak(allocations):
    def total(moment):
        return sum(a.bytes for a in allocations if a.alive(moment))

    moments = sorted({a.birth for a in allocations})
    peak = max(moments, key=total)  # the first, if there are several
    split = {}
    for a in allocations:
        if a.alive(peak):
            split[a.category] = split.get(a.category, 0) + a.bytes
    return split


def statuses(readings, budget, window):
    result = []
    for end in range(1, len(readings) + 1):
        peak = max(readings[max(end - window, 0) : end])
        critical, warning = peak >= 0.9 * budget, peak >= 0.8 * budget
        result.append(
            "critical" if critical else "warning" if warning else "normal"
        )
    return result


def collect_above(used, budget, threshold):
    before = used()
    if before < threshold * budget:
        return 0
    gc.collect()
    return before - used()


def allocated(sizes):
    return sum((size + 511) // 512 * 512 for size in sizes)
