"""Solutions of the exercises, as the notebooks show them folded."""

from math import ceil

import torch
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

from membudget import checkpointing as ck


def remember(length):
    there = [f"record {i}" for i in range(length)]
    back = [f"backward {i}" for i in reversed(range(length))]
    return there + back


def forget(length):
    schedule = []
    for stage in reversed(range(length)):
        schedule += [f"forward {i}" for i in range(stage)]
        schedule += [f"record {stage}", f"backward {stage}"]
    return schedule


def square_root(length):
    n = round(length**0.5)
    segments = [list(range(i, i + n)) for i in range(0, length - n, n)]
    return segments + list(range(length - n, length))


def shrinking(length):
    segments, start = [], 0
    size = int((2 * length) ** 0.5)
    while start < length:
        segments.append(list(range(start, start + size)))
        start, size = start + size, size - 1
    return segments


def two_sweeps(length):
    def cut(stages, sizes):
        parts = []
        for size in sizes:
            parts.append(stages[:size])
            stages = stages[size:]
        return [part for part in parts if part]

    m = {16: 4, 24: 5}[length]
    triangles = [k * (k + 1) // 2 for k in range(m, 0, -1)]
    outer = cut(list(range(length)), triangles)
    return [cut(part, range(m - j, 0, -1)) for j, part in enumerate(outer)]


def uneven(chain, budget):
    # from one small boundary to the next, over a large one
    return [0, [1, 2, 3, 4], 5, 6, 7]


def expensive(chain):
    # stage 4 takes 10 times as long: it keeps its tape
    return [[0, 1, 2, 3], 4, [5, 6], 7, 8]


def best_count(length, boundary, tape):
    def peak(count):
        return count * boundary + ceil(length / count) * tape

    return min(range(1, length + 1), key=peak)


def sequential_peak(length, count):
    last = length - (count - 1) * (length // count)
    return count + last  # count - 1 boundaries, the last tapes, a gradient


def segment_step(segments, x):
    for segment in segments:
        x = checkpoint(segment, x, use_reentrant=False)
    x.sum().backward()


def cheapest_count(chain, budget):
    fitting = []
    for count in range(len(chain) + 1):
        segments = ck.no_segments(len(chain))
        if count:
            segments = ck.equal_segments(len(chain), count)
        run = ck.simulate(chain, segments)
        if run.peak <= budget:
            fitting.append((run.extra_time, count))
    if not fitting:
        raise ValueError("no number of segments fits")
    return min(fitting)[1]


def survive(step, batch):
    size = batch
    while True:
        try:
            step(size)
            return size
        except torch.OutOfMemoryError:
            if size == 1:
                raise
        size //= 2  # here the error and all that it held are gone


def same_network(layers, x, count):
    def run(x, part):
        for i in part:
            x = F.relu(layers[i](x))
        return x

    for part in ck.equal_segments(len(layers), count):
        x = checkpoint(run, x, part, use_reentrant=False)
    return x


def clipped_amp_step(model, optimizer, scaler, x, y, max_norm):
    with torch.autocast("cpu", torch.float16):
        loss = F.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def two_losses(model, optimizer, scaler, x, y):
    with torch.autocast("cpu", torch.float16):
        logits = model(x)
        main = F.cross_entropy(logits, y)
        auxiliary = logits.float().square().mean()
    scaler.scale(main + auxiliary).backward()
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
    return int(torch.stack(losses).argmin())


def train_step(model, optimizer, scaler, x, y, dtype):
    with torch.autocast("cpu", dtype):
        loss = F.cross_entropy(model(x), y)
    if dtype == torch.float16:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    else:
        loss.backward()
        optimizer.step()
    optimizer.zero_grad()
