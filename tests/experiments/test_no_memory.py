"""Too little memory is what one run finds, and the others go on; any other
error is one."""

import gc
import weakref

import pytest
import torch

from membudget_experiments import ledger, precision

CPU = torch.device("cpu")
MLP = dict(model="mlp", inputs=12, width=24, depth=5, outputs=10)
BLOCKS = dict(model="mlp_blocks", width=16, depth=2, batch=64)
TRAINED = dict(steps=1, warm_up=0, repeats=1)
# an experiment with two runs, and what it needs memory for
CASES = {
    "ledger": (
        ledger.step_peaks,
        dict(networks={"mlp": MLP}, half="bfloat16", warm_up=0, repeats=1),
        [["mlp", "plain", 8], ["mlp", "plain", 16]],
        (ledger, "trace_step"),
    ),
    "precision": (
        precision.mixed_precision,
        dict(networks={"mlp": BLOCKS}, rate=0.01, **TRAINED),
        [["mlp", "plain", "fp32"], ["mlp", "checkpointed", "fp32"]],
        (precision, "_learn"),
    ),
}
EVERY = pytest.mark.parametrize("name", CASES)


@EVERY
def test_the_run_is_none_and_the_others_go_on(monkeypatch, name):
    experiment, given, runs, place = CASES[name]
    error = torch.OutOfMemoryError("CUDA out of memory")
    held, real = [], getattr(*place)

    def short(*args, **options):
        if not held:
            network = torch.nn.Linear(1, 1)
            held.append(weakref.ref(network))
            raise error
        gc.collect()
        assert held[0]() is None
        return real(*args, **options)

    monkeypatch.setattr(*place, short)
    _, first, second = experiment(CPU, runs=runs, **given)
    assert first.keys() == experiment.experiment.units.keys()
    names = {"run", "network", "method", "batch", "scenario", "format"}
    found = {key: first[key] for key in first.keys() - names}
    assert found.pop("support", "native") == "native"
    assert found.pop("outcome", "out of memory") == "out of memory"
    assert {*found.values()} == {None}
    assert second["requested"] > 0


@EVERY
def test_another_error_is_passed_on(monkeypatch, name):
    experiment, given, runs, place = CASES[name]

    def fail(*args, **options):
        raise RuntimeError("shapes")

    monkeypatch.setattr(*place, fail)
    steps = experiment(CPU, runs=runs, **given)
    next(steps)
    with pytest.raises(RuntimeError, match="shapes"):
        next(steps)
