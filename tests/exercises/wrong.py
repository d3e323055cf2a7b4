# ruff: noqa: F811 (one name, many answers)
"""Plausible wrong answers, each with words of the hint it must get.

They are written as a reader would, not through the checkers' own variants.
"""

import math
from collections import defaultdict

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from membudget import checkpointing as ck

ANSWERS = defaultdict(list)


def hinted(words):
    """Register a wrong answer to the exercise that the name begins with."""

    def register(fn):
        ANSWERS[fn.__name__].append((fn, words))
        return fn

    return register


# remember


@hinted("action 1, backward 0: the gradient stands before stage 3, which")
def remember(length):
    return [f"{kind} {i}" for i in range(length) for kind in PASSES]


PASSES = ("record", "backward")


@hinted("action 4, backward 3: stage 3 has no tape: record it first")
def remember(length):
    there = [f"forward {i}" for i in range(length)]
    return there + [f"backward {i}" for i in reversed(range(length))]


@hinted("it runs 4 stages again; none is allowed")
def remember(length):
    return [list(range(length))]


@hinted("at its end (after 4 actions): the backward pass of stage 3 is miss")
def remember(length):
    return [f"record {i}" for i in range(length)]


@hinted("the segments hold 'record 0': use stage numbers, and lists of")
def remember(length):
    return [0, "record 0"]


@hinted("an action is one of forward, record, keep, drop, backward")
def remember(length):
    return ["remember 0"]


@hinted("use 0 to 3, each once, in order")
def remember(length):
    return list(range(1, length + 1))


@hinted("your function returns an int: a schedule is needed")
def remember(length):
    return length


@hinted("returns None: end it with `return`")
def remember(length):
    [f"record {i}" for i in range(length)]


@hinted("at its end (after 0 actions)")
def remember(length):
    return []


# forget


@hinted(
    "the peak is 6 units in action 5, backward 4: 5 on tapes, 1 of "
    "workspace; at most 4 are allowed"
)
def forget(length):
    return list(range(length))


@hinted("; at most 4 are allowed. (Tried")
def forget(length):
    return [list(range(length))]


@hinted("action 5, record 4: its input, boundary 4, is not there")
def forget(length):
    schedule = [f"forward {i}" for i in range(length)]
    for i in reversed(range(length)):
        schedule += [f"record {i}", f"backward {i}"]
    return schedule


@hinted("4 kept")
def forget(length):
    return [[i] for i in range(length)]


@hinted("it runs 15 stages again; at most 10 are allowed")
def forget(length):
    schedule = [f"forward {i}" for i in range(length)]
    for stage in reversed(range(length)):
        schedule += [f"forward {i}" for i in range(stage)]
        schedule += [f"record {stage}", f"backward {stage}"]
    return schedule


# square_root


@hinted("it runs 9 stages again; at most 6 are allowed. (Tried")
def square_root(length):
    return ck.equal_segments(length, round(length**0.5))


@hinted("at most 6 are allowed. (Tried: a chain of 9 stages")
def square_root(length):
    return ck.pytorch_segments(length, 2)


@hinted("the peak is 10 units")
def square_root(length):
    return range(length)


@hinted("And it runs 9 stages again; at most 6 are allowed.")
def square_root(length):
    return ck.equal_segments(length, length)


@hinted("a segment is empty")
def square_root(length):
    n = round(length**0.5)
    return [list(range(i, i + n)) for i in range(0, length, n)] + [[]]


# shrinking


@hinted("the peak is 8 units")
def shrinking(length):
    return ck.equal_segments(length, 4)


@hinted("the peak is 10 units")
def shrinking(length):
    return ck.segments_of(range(1, int((2 * length) ** 0.5) + 1))


@hinted("each once, in order")
def shrinking(length):
    size, start, segments = 6, 0, []
    while size:
        segments.append(list(range(start, start + size)))
        start, size = start + size, size - 1
    return segments


@hinted("it runs 60 stages again; at most 15 are allowed")
def shrinking(length):
    schedule = [f"forward {i}" for i in range(9)] + ["keep 9"]
    for first, last in ((9, length), (0, 9)):
        for stage in reversed(range(first, last)):
            schedule += [f"forward {i}" for i in range(first, stage)]
            schedule += [f"record {stage}", f"backward {stage}"]
    return schedule


# two_sweeps


@hinted("the peak is 8 units")
def two_sweeps(length):
    return ck.equal_segments(length, 4)


@hinted("the peak is 7 units in action ")
def two_sweeps(length):
    return ck.segments_of([5, 4, 3, 2, 2])


@hinted("stage 0 runs 15 times again; at most 2 are allowed.")
def two_sweeps(length):
    schedule = []
    for stage in reversed(range(length)):
        schedule += [f"forward {i}" for i in range(stage)]
        schedule += [f"record {stage}", f"backward {stage}"]
    return schedule


@hinted("stage 0 runs 3 times again; at most 2 are allowed.")
def two_sweeps(length):
    if length == 16:
        return [
            [[0, 1, 2, 3], 4, 5, 6],
            [[7, 8, 9], 10, 11],
            [[12, 13], 14],
            15,
        ]
    # 45 stages run again, and the peak is 6
    first = [[[0, 1, 2, 3], 4, 5, 6], [7, 8, 9], [10, 11], 12]
    return [first, [[13, 14, 15], [16, 17], 18], [[19, 20], 21], 22, 23]


# uneven


@hinted("the peak is 32 units in action ")
def uneven(chain, budget):
    return ck.equal_segments(len(chain), 3)


@hinted("it runs 5 stages again; at most 4 are allowed")
def uneven(chain, budget):
    return [[0], [1, 2, 3, 4], 5, 6, 7]


@hinted("the peak is 41 units")
def uneven(chain, budget):
    return range(len(chain))


@hinted("the peak is 33 units")
def uneven(chain, budget):
    return [0, 1, 2, [3, 4], 5, 6, 7]


# expensive


@hinted("it runs 6 stages again, which takes 15; at most 6 are allowed")
def expensive(chain):
    return [[0, 1, 2], [3, 4, 5], 6, 7, 8]


@hinted("the peak is 7 units")
def expensive(chain):
    return [[0, 1, 2, 3], 4, 5, 6, 7, 8]


@hinted("the peak is 7 units")
def expensive(chain):
    return [[0, 1, 2, 3], 4, [5, 6, 7, 8]]


# best_count


@hinted("near √L")
def best_count(length, boundary, tape):
    return min(range(1, length + 1), key=lambda k: k + math.ceil(length / k))


@hinted("the costs are swapped")
def best_count(length, boundary, tape):
    def peak(k):
        return k * tape + math.ceil(length / k) * boundary

    return min(range(1, length + 1), key=peak)


@hinted("near √(L·a/c). The longest segment has")
def best_count(length, boundary, tape):
    return min(length, max(1, round(math.sqrt(length * tape / boundary))))


@hinted("The longest segment has ⌈L/k⌉ stages, and not L/k")
def best_count(length, boundary, tape):
    counts = range(1, length + 1)
    return min(counts, key=lambda k: k * boundary + length / k * tape)


@hinted("the smallest of them is asked")
def best_count(length, boundary, tape):
    best = 1
    for k in range(1, length + 1):
        now = k * boundary + math.ceil(length / k) * tape
        if now <= best * boundary + math.ceil(length / best) * tape:
            best = k
    return best


@hinted("k = length, is a choice too")
def best_count(length, boundary, tape):
    def peak(k):
        return k * boundary + math.ceil(length / k) * tape

    return min(range(1, length), key=peak)


@hinted("this is the least peak")
def best_count(length, boundary, tape):
    return min(
        k * boundary + math.ceil(length / k) * tape
        for k in range(1, length + 1)
    )


# sequential_peak


@hinted("the last segment is longer")
def sequential_peak(length, count):
    return count + length // count


@hinted("the last segment is longer")
def sequential_peak(length, count):
    return count - 1 + length // count


@hinted("rounds down, and the last one takes what remains")
def sequential_peak(length, count):
    return count + math.ceil(length / count)


@hinted("one unit is missing: the gradient")
def sequential_peak(length, count):
    return count - 1 + length - (count - 1) * (length // count)


@hinted("one unit is too much")
def sequential_peak(length, count):
    return count + length - (count - 1) * (length // count) + 1


@hinted("the boundaries are missing")
def sequential_peak(length, count):
    return length - (count - 1) * (length // count) + 1


@hinted("the answer is 15; 13 is right")
def sequential_peak(length, count):
    return 2 + length - (count - 1) * (length // count) + count


# segment_step


@hinted("no gradient for segments 0, 1 and 2: the graph is cut")
def segment_step(segments, x):
    for segment in segments:
        x = segment(x.detach())
    x.sum().backward()


@hinted("nothing is checkpointed")
def segment_step(segments, x):
    for segment in segments:
        x = segment(x)
    x.sum().backward()


@hinted("Segments 0, 1 and 2 ran once, with all activations kept")
def segment_step(segments, x):
    for segment in segments[:-1]:
        x = segment(x)
    checkpoint(segments[-1], x, use_reentrant=False).sum().backward()


@hinted("Segment 0 ran once, with all activations kept")
def segment_step(segments, x):
    x = segments[0](x)
    for segment in segments[1:]:
        x = checkpoint(segment, x, use_reentrant=False)
    x.sum().backward()


@hinted("Checkpoint each segment by itself")
def segment_step(segments, x):
    whole = nn.Sequential(*segments)
    checkpoint(whole, x, use_reentrant=False).sum().backward()


@hinted("no gradient for segment 0: the graph is cut")
def segment_step(segments, x):
    x = checkpoint(segments[0], x, use_reentrant=True)
    for segment in segments[1:]:
        x = checkpoint(segment, x, use_reentrant=False)
    x.sum().backward()


@hinted("the output has no graph. What comes out of `no_grad`")
def segment_step(segments, x):
    for segment in segments:
        x = checkpoint(segment, x, use_reentrant=True)
    x.sum().backward()


@hinted("no gradient in `param.grad` at the end: your function returns a Te")
def segment_step(segments, x):
    for segment in segments:
        x = checkpoint(segment, x, use_reentrant=False)
    return x.sum()


@hinted("the gradient is off by")
def segment_step(segments, x):  # every segment begins with a gradient of 1
    inputs = []
    with torch.no_grad():
        for segment in segments:
            inputs.append(x)
            x = segment(x)
    for segment, value in zip(segments, inputs, strict=True):
        segment(value).sum().backward()


@hinted("the gradient is 0.007812 times the right one")
def segment_step(segments, x):
    for segment in segments:
        x = checkpoint(segment, x, use_reentrant=False)
    (x.sum() / len(x)).backward()


# cheapest_count


def run_with(chain, count):
    n = len(chain)
    segments = ck.equal_segments(n, count) if count else ck.no_segments(n)
    return ck.simulate(chain, segments)


@hinted("the fewest segments that fit need not be the cheapest")
def cheapest_count(chain, budget):
    for count in range(len(chain) + 1):
        if run_with(chain, count).peak <= budget:
            return count
    raise ValueError


@hinted("the least peak: any peak within the budget is good enough")
def cheapest_count(chain, budget):
    counts = range(len(chain) + 1)
    count = min(counts, key=lambda count: run_with(chain, count).peak)
    if run_with(chain, count).peak > budget:
        raise ValueError
    return count


@hinted("no checkpointing at all, 0 segments, is a choice too")
def cheapest_count(chain, budget):
    runs = [(run_with(chain, k), k) for k in range(1, len(chain) + 1)]
    fits = [(run.extra_time, k) for run, k in runs if run.peak <= budget]
    return min(fits)[1]


@hinted("the smallest of them is asked")
def cheapest_count(chain, budget):
    runs = [(run_with(chain, k), k) for k in range(len(chain) + 1)]
    fits = [(-run.extra_time, k) for run, k in runs if run.peak <= budget]
    return max(fits)[1]


@hinted("`<=`, not `<`")
def cheapest_count(chain, budget):
    runs = [(run_with(chain, k), k) for k in range(len(chain) + 1)]
    return min((run.extra_time, k) for run, k in runs if run.peak < budget)[1]


@hinted("a ValueError must be raised")
def cheapest_count(chain, budget):
    runs = [(run_with(chain, k), k) for k in range(len(chain) + 1)]
    fits = [(run.extra_time, k) for run, k in runs if run.peak <= budget]
    return min(fits)[1] if fits else len(chain)


@hinted("IndexError in line 5 of your function: list index out of range")
def cheapest_count(chain, budget):
    runs = [(run_with(chain, k), k) for k in range(len(chain) + 1)]
    fits = [(run.extra_time, k) for run, k in runs if run.peak <= budget]
    return sorted(fits)[0][1]


@hinted("does not fit")
def cheapest_count(chain, budget):
    return 0


# survive


@hinted("the failed attempt is still alive when the next one begins")
def survive(step, batch):
    try:
        step(batch)
        return batch
    except torch.OutOfMemoryError:
        if batch == 1:
            raise
        return survive(step, batch // 2)


@hinted("the failed attempt is still alive when the next one begins")
def survive(step, batch):
    failed = None
    while batch:
        try:
            step(batch)
            return batch
        except torch.OutOfMemoryError as error:
            failed = error
        batch //= 2
    raise failed


@hinted("an error that is not about memory is caught")
def survive(step, batch):
    while True:
        try:
            step(batch)
            return batch
        except RuntimeError:
            if batch == 1:
                raise
        batch //= 2


@hinted("an error that is not about memory is caught")
def survive(step, batch):
    while True:
        try:
            step(batch)
            return batch
        except Exception:
            if batch == 1:
                raise
        batch //= 2


@hinted("a batch of no samples fits and trains nothing")
def survive(step, batch):
    while True:
        try:
            step(batch)
            return batch
        except torch.OutOfMemoryError:
            pass
        batch //= 2


@hinted("the error passes through")
def survive(step, batch):
    step(batch)
    return batch


@hinted("the size falls by one at a time")
def survive(step, batch):
    for size in range(batch, 0, -1):
        try:
            step(size)
            return size
        except torch.OutOfMemoryError:
            if size == 1:
                raise


@hinted("the same size is tried again and again")
def survive(step, batch):
    while True:
        try:
            step(batch)
            return batch
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()


@hinted("`size // 2`, not `size / 2`")
def survive(step, batch):
    while True:
        try:
            step(batch)
            return batch
        except torch.OutOfMemoryError:
            if batch <= 1:
                raise
        batch /= 2


@hinted("what the step returned")
def survive(step, batch):
    while True:
        try:
            return step(batch)
        except torch.OutOfMemoryError:
            if batch == 1:
                raise
        batch //= 2


@hinted("OutOfMemoryError is needed here. ValueError in line 9")
def survive(step, batch):
    while batch:
        try:
            step(batch)
            return batch
        except torch.OutOfMemoryError:
            batch //= 2
    raise ValueError("not even one sample fits")


@hinted("the list of sizes tried is 5 numbers; it must be 4 numbers")
def survive(step, batch):
    while True:
        try:
            step(batch)
        except torch.OutOfMemoryError:
            if batch == 1:
                raise
        else:
            step(batch)
            return batch
        batch //= 2


# same_network


def segment(layers, part, x):
    for i in part:
        x = F.relu(layers[i](x))
    return x


@hinted("without them the network is linear")
def same_network(layers, x, count):
    return checkpoint_sequential(layers, count, x, use_reentrant=False)


@hinted("after the last layer of each segment is missing")
def same_network(layers, x, count):
    for part in ck.equal_segments(len(layers), count):
        inside = [layers[part[0]]]
        for i in part[1:]:
            inside += [nn.ReLU(), layers[i]]
        x = checkpoint(nn.Sequential(*inside), x, use_reentrant=False)
    return x


@hinted("run between the segments alone")
def same_network(layers, x, count):
    for part in ck.equal_segments(len(layers), count):
        inside = nn.Sequential(*[layers[i] for i in part])
        x = F.relu(checkpoint(inside, x, use_reentrant=False))
    return x


@hinted("the activation function after the last layer is missing")
def same_network(layers, x, count):
    stages = [nn.Sequential(layer, nn.ReLU()) for layer in layers[:-1]]
    for part in ck.equal_segments(len(layers), count):
        inside = nn.Sequential(*[[*stages, layers[-1]][i] for i in part])
        x = checkpoint(inside, x, use_reentrant=False)
    return x


@hinted("no layer runs again in the backward pass")
def same_network(layers, x, count):
    return segment(layers, range(len(layers)), x)


@hinted("1 × the size of x is alive after the forward pass; 3 segments leave")
def same_network(layers, x, count):
    whole = range(len(layers))
    return checkpoint(segment, layers, whole, x, use_reentrant=False)


@hinted("6 × the size of x is alive after the forward pass; 3 segments leave")
def same_network(layers, x, count):
    for i in range(len(layers)):
        x = checkpoint(segment, layers, [i], x, use_reentrant=False)
    return x


@hinted("the backward pass recomputes the wrong layers: layers 4 and 5")
def same_network(layers, x, count):
    for part in ck.equal_segments(len(layers), count):
        x = checkpoint(
            lambda x: segment(layers, part, x),  # noqa: B023
            x,
            use_reentrant=False,
        )
    return x


@hinted("the output has no graph")
def same_network(layers, x, count):
    with torch.no_grad():
        return segment(layers, range(len(layers)), x)


@hinted("no gradient for layers 0 and 1: the graph is cut")
def same_network(layers, x, count):
    first, *rest = ck.equal_segments(len(layers), count)
    x = checkpoint(segment, layers, first, x, use_reentrant=True)
    for part in rest:
        x = checkpoint(segment, layers, part, x, use_reentrant=False)
    return x


@hinted("your function returns a list: the output is needed, a tensor")
def same_network(layers, x, count):
    outputs = [x]
    for part in ck.equal_segments(len(layers), count):
        outputs.append(segment(layers, part, outputs[-1]))
    return outputs


@hinted("returns None: end it with `return`")
def same_network(layers, x, count):
    for part in ck.equal_segments(len(layers), count):
        x = checkpoint(segment, layers, part, x, use_reentrant=False)


# clipped_amp_step


def fp16_loss(model, x, y, dtype=torch.float16):
    with torch.autocast("cpu", dtype):
        return F.cross_entropy(model(x), y)


@hinted("clipped while it is still multiplied by the loss scale")
def clipped_amp_step(model, optimizer, scaler, x, y, max_norm):
    scaler.scale(fp16_loss(model, x, y)).backward()
    clip_grad_norm_(model.parameters(), max_norm)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


@hinted("the step is taken with the unclipped gradient")
def clipped_amp_step(model, optimizer, scaler, x, y, max_norm):
    scaler.scale(fp16_loss(model, x, y)).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


@hinted("cuts each number by itself")
def clipped_amp_step(model, optimizer, scaler, x, y, max_norm):
    scaler.scale(fp16_loss(model, x, y)).backward()
    scaler.unscale_(optimizer)
    clip_grad_value_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


@hinted("an overflow must skip the step")
def clipped_amp_step(model, optimizer, scaler, x, y, max_norm):
    scaler.scale(fp16_loss(model, x, y)).backward()
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    scaler.update()
    optimizer.zero_grad()


@hinted("the loss scale stays as it was")
def clipped_amp_step(model, optimizer, scaler, x, y, max_norm):
    scaler.scale(fp16_loss(model, x, y)).backward()
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    optimizer.zero_grad()


@hinted("does not run in fp16")
def clipped_amp_step(model, optimizer, scaler, x, y, max_norm):
    scaler.scale(F.cross_entropy(model(x), y)).backward()
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


@hinted("gradients are still there at the end")
def clipped_amp_step(model, optimizer, scaler, x, y, max_norm):
    scaler.scale(fp16_loss(model, x, y)).backward()
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()


@hinted("once is enough")
def clipped_amp_step(model, optimizer, scaler, x, y, max_norm):
    scaler.scale(fp16_loss(model, x, y)).backward()
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), max_norm)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


@hinted("the backward pass runs under autocast")
def clipped_amp_step(model, optimizer, scaler, x, y, max_norm):
    with torch.autocast("cpu", torch.float16):
        scaler.scale(F.cross_entropy(model(x), y)).backward()
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


@hinted("but a block is still open")
def clipped_amp_step(model, optimizer, scaler, x, y, max_norm):
    with torch.autocast("cpu", torch.float16):
        loss = F.cross_entropy(model(x), y)
        with torch.autocast("cpu", enabled=False):
            scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


@hinted("the scaler is not used, and in fp16 small gradients become zero")
def clipped_amp_step(model, optimizer, scaler, x, y, max_norm):
    fp16_loss(model, x, y).backward()
    clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    optimizer.zero_grad()


@hinted("the scaler has nothing to unscale")
def clipped_amp_step(model, optimizer, scaler, x, y, max_norm):
    fp16_loss(model, x, y).backward()
    clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    scaler.update()
    optimizer.zero_grad()


@hinted("the scaler has nothing to unscale")
def clipped_amp_step(model, optimizer, scaler, x, y, max_norm):
    fp16_loss(model, x, y).backward()
    clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


# two_losses


def both_losses(model, x, y, cast=torch.Tensor.float):
    with torch.autocast("cpu", torch.float16):
        logits = model(x)
        return F.cross_entropy(logits, y), cast(logits).square().mean()


@hinted("65 536 is an overflow there")
def two_losses(model, optimizer, scaler, x, y):
    scaler.scale(sum(both_losses(model, x, y, torch.Tensor.half))).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


@hinted("the optimizer steps 2 times")
def two_losses(model, optimizer, scaler, x, y):
    second = torch.amp.GradScaler("cpu")
    main, auxiliary = both_losses(model, x, y)
    scaler.scale(main).backward(retain_graph=True)
    scaler.step(optimizer)
    optimizer.zero_grad()
    second.scale(auxiliary).backward()
    second.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


@hinted("the optimizer steps 2 times")  # and the update is right, under SGD
def two_losses(model, optimizer, scaler, x, y):
    second = torch.amp.GradScaler("cpu")
    main, auxiliary = both_losses(model, x, y)
    scaler.scale(main).backward(retain_graph=True)
    scaler.step(optimizer)
    second.scale(auxiliary).backward()
    second.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


@hinted("the optimizer steps 2 times")
def two_losses(model, optimizer, scaler, x, y):
    second = torch.amp.GradScaler("cpu")
    for number, own in enumerate((scaler, second)):
        own.scale(both_losses(model, x, y)[number]).backward()
        own.step(optimizer)
        own.update()
        optimizer.zero_grad()


@hinted("the scaler is not used, and in fp16 small gradients become zero")
def two_losses(model, optimizer, scaler, x, y):
    sum(both_losses(model, x, y)).backward()
    optimizer.step()
    optimizer.zero_grad()


@hinted("the backward pass runs under autocast")
def two_losses(model, optimizer, scaler, x, y):
    with torch.autocast("cpu", torch.float16):
        scaler.scale(sum(both_losses(model, x, y))).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


@hinted("so it is divided twice")
def two_losses(model, optimizer, scaler, x, y):
    second = torch.amp.GradScaler("cpu")
    main, auxiliary = both_losses(model, x, y)
    scaler.scale(main).backward(retain_graph=True)
    second.scale(auxiliary).backward()
    scaler.unscale_(optimizer)
    second.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


@hinted("the auxiliary loss has a scaler of its own")
def two_losses(model, optimizer, scaler, x, y):
    second = torch.amp.GradScaler("cpu", init_scale=1024.0)
    main, auxiliary = both_losses(model, x, y)
    scaler.scale(main).backward(retain_graph=True)
    second.scale(auxiliary).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


@hinted("the auxiliary loss is not scaled")
def two_losses(model, optimizer, scaler, x, y):
    main, auxiliary = both_losses(model, x, y)
    scaler.scale(main).backward(retain_graph=True)
    auxiliary.backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


@hinted("the auxiliary loss is not scaled")
def two_losses(model, optimizer, scaler, x, y):
    main, auxiliary = both_losses(model, x, y)
    (scaler.scale(main) + auxiliary).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


@hinted("the auxiliary loss is missing")
def two_losses(model, optimizer, scaler, x, y):
    main, _ = both_losses(model, x, y)
    scaler.scale(main).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


@hinted("there is a step for each loss")
def two_losses(model, optimizer, scaler, x, y):
    main, auxiliary = both_losses(model, x, y)
    for loss in (main, auxiliary):
        scaler.scale(loss).backward(retain_graph=True)
        scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


@hinted("there is a step for each loss")
def two_losses(model, optimizer, scaler, x, y):
    main, auxiliary = both_losses(model, x, y)
    for loss in (main, auxiliary):
        scaler.scale(loss).backward(retain_graph=True)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


@hinted("the first backward pass frees the graph")
def two_losses(model, optimizer, scaler, x, y):
    for loss in both_losses(model, x, y):
        scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


@hinted("the main loss is missing")
def two_losses(model, optimizer, scaler, x, y):
    for loss in both_losses(model, x, y):
        optimizer.zero_grad()
        scaler.scale(loss).backward(retain_graph=True)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


@hinted("unscale once, after both")
def two_losses(model, optimizer, scaler, x, y):
    main, auxiliary = both_losses(model, x, y)
    scaler.scale(main).backward(retain_graph=True)
    scaler.unscale_(optimizer)
    scaler.scale(auxiliary).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


@hinted("update once, after the step")
def two_losses(model, optimizer, scaler, x, y):
    main, auxiliary = both_losses(model, x, y)
    scaler.scale(main).backward(retain_graph=True)
    scaler.update()
    scaler.scale(auxiliary).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


@hinted("divides by it and looks")
def two_losses(model, optimizer, scaler, x, y):
    main, auxiliary = both_losses(model, x, y)
    scaler.scale(main + auxiliary).backward()
    optimizer.step()
    optimizer.zero_grad()


# backward_outside


@hinted("the backward pass runs under autocast")
def backward_outside(model, optimizer, x, y):
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@hinted("the backward pass runs under autocast")
def backward_outside(model, optimizer, x, y):
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(model(x), y)
    with torch.autocast("cpu", torch.bfloat16):
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@hinted("but a block is still open")
def backward_outside(model, optimizer, x, y):
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(model(x), y)
        with torch.autocast("cpu", enabled=False):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


@hinted("but a block is still open")
def backward_outside(model, optimizer, x, y):
    with torch.autocast("cpu", torch.bfloat16):
        fp16_loss(model, x, y, torch.bfloat16)
        loss = fp16_loss(model, x, y, torch.bfloat16)
        with torch.autocast("cpu", enabled=False):
            loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@hinted("the optimizer steps under autocast")
def backward_outside(model, optimizer, x, y):
    fp16_loss(model, x, y, torch.bfloat16).backward()
    with torch.autocast("cpu", torch.bfloat16):
        optimizer.step()
    optimizer.zero_grad()


@hinted("the forward pass does not run in bf16")
def backward_outside(model, optimizer, x, y):
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


@hinted("the forward pass does not run in bf16")
def backward_outside(model, optimizer, x, y):
    fp16_loss(model, x, y).backward()
    optimizer.step()
    optimizer.zero_grad()


@hinted("the optimizer does not step")
def backward_outside(model, optimizer, x, y):
    fp16_loss(model, x, y, torch.bfloat16).backward()
    optimizer.zero_grad()


@hinted("gradients are still there at the end")
def backward_outside(model, optimizer, x, y):
    fp16_loss(model, x, y, torch.bfloat16).backward()
    optimizer.step()


# best_epoch


@hinted("the losses are compared in fp16")
def best_epoch(losses):
    history = [loss.to(torch.float16).item() for loss in losses]
    return history.index(min(history))


@hinted("the losses are compared in bf16")
def best_epoch(losses):
    return int(torch.stack(losses).bfloat16().argmin())


@hinted("the largest loss")
def best_epoch(losses):
    return int(torch.stack(losses).argmax())


@hinted("count from 0")
def best_epoch(losses):
    return 1 + int(torch.stack(losses).argmin())


@hinted("this is the loss itself")
def best_epoch(losses):
    return torch.stack(losses).min()


# train_step


@hinted("the scaler works under bf16, too")
def train_step(model, optimizer, scaler, x, y, dtype):
    loss = fp16_loss(model, x, y, dtype)
    if dtype == torch.bfloat16:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    else:
        loss.backward()
        optimizer.step()
    optimizer.zero_grad()


@hinted("the scaler is left out under fp16, too")
def train_step(model, optimizer, scaler, x, y, dtype):
    fp16_loss(model, x, y, dtype).backward()
    optimizer.step()
    optimizer.zero_grad()


@hinted("the gradient never unscaled: leave the scaler out of both")
def train_step(model, optimizer, scaler, x, y, dtype):
    scaler.scale(fp16_loss(model, x, y, dtype)).backward()
    if dtype == torch.float16:
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()
    optimizer.zero_grad()


@hinted("although the loss is not scaled")
def train_step(model, optimizer, scaler, x, y, dtype):
    loss = fp16_loss(model, x, y, dtype)
    if dtype == torch.float16:
        loss = scaler.scale(loss)
    loss.backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


@hinted("the loss scale stays as it was")
def train_step(model, optimizer, scaler, x, y, dtype):
    loss = fp16_loss(model, x, y, dtype)
    if dtype == torch.float16:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
    else:
        loss.backward()
        optimizer.step()
    optimizer.zero_grad()


@hinted("the forward pass does not run in `dtype`")
def train_step(model, optimizer, scaler, x, y, dtype):
    loss = fp16_loss(model, x, y)
    if dtype == torch.float16:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    else:
        loss.backward()
        optimizer.step()
    optimizer.zero_grad()


@hinted("the forward pass does not run in `dtype`")
def train_step(model, optimizer, scaler, x, y, dtype):
    loss = F.cross_entropy(model(x), y)
    if dtype == torch.float16:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    else:
        loss.backward()
        optimizer.step()
    optimizer.zero_grad()


@hinted("the scaler has scaled no loss")
def train_step(model, optimizer, scaler, x, y, dtype):
    if dtype == torch.bfloat16:
        scaler.update(65536.0)
    scaler.scale(fp16_loss(model, x, y, dtype)).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


@hinted("the scaler is used under bf16")
def train_step(model, optimizer, scaler, x, y, dtype):
    scaler.scale(fp16_loss(model, x, y, dtype)).backward()
    scaler.step(optimizer)
    scaler.update(None if dtype == torch.float16 else 65536.0)
    optimizer.zero_grad()


@hinted("the scaler has nothing to unscale")
def train_step(model, optimizer, scaler, x, y, dtype):
    fp16_loss(model, x, y, dtype).backward()
    if dtype == torch.float16:
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()
    optimizer.zero_grad()


@hinted("the backward pass runs under autocast")
def train_step(model, optimizer, scaler, x, y, dtype):
    with torch.autocast("cpu", dtype):
        loss = F.cross_entropy(model(x), y)
        if dtype == torch.float16:
            loss = scaler.scale(loss)
        loss.backward()
    if dtype == torch.float16:
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()
    optimizer.zero_grad()


@hinted("only its update is left out")
def train_step(model, optimizer, scaler, x, y, dtype):
    scaler.scale(fp16_loss(model, x, y, dtype)).backward()
    scaler.step(optimizer)
    if dtype == torch.float16:
        scaler.update()
    optimizer.zero_grad()


@hinted("only its update is left out")
def train_step(model, optimizer, scaler, x, y, dtype):
    scaler.scale(fp16_loss(model, x, y, dtype)).backward()
    scaler.step(optimizer)
    optimizer.zero_grad()
