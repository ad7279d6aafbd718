"""PyTorch: a plain loop, and Lightning's Trainer.

They are not needed to work on this package, so a checker may not find them.
"""
# pyright: reportMissingImports=false

import itertools
import logging
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from .works import make_batches, make_data, RATE, Work


def make_plain(work: Work) -> Callable[[int], int]:
    """The loop that PyTorch's documentation shows, over batches made beforehand."""
    import torch

    batches = [_to_torch(*batch) for batch in make_batches(work)]
    loss_of = _make_loss(work)

    def run_with(fused: bool) -> Callable[[int], int]:
        def run(steps: int) -> int:
            net = _make_net(work)
            optimizer = torch.optim.Adam(net.parameters(), lr=RATE, fused=fused)
            for x, y in itertools.islice(itertools.cycle(batches), steps):
                optimizer.zero_grad()
                loss_of(net(x), y).backward()
                optimizer.step()
            return steps

        return run

    return run_with(_choose(run_with))


def make_lightning(work: Work, whole_batches: bool) -> Callable[[int], int]:
    """`Trainer.fit` without bar, logger and checkpoints, its data shuffled.

    With `whole_batches` the loader takes a batch from the tensors at once and not
    example by example, and the Trainer is told to leave out all that it can.
    """
    warnings.filterwarnings("ignore")
    import lightning
    import torch

    for name in ("lightning", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.ERROR)
    data = torch.utils.data.TensorDataset(*_to_torch(*make_data(work)))
    order = torch.utils.data.RandomSampler(data)
    if whole_batches:
        order = torch.utils.data.BatchSampler(order, work.batch_size, drop_last=True)
        loader = torch.utils.data.DataLoader(data, sampler=order, batch_size=None)
        off: dict[str, Any] = {"barebones": True}
    else:
        loader = torch.utils.data.DataLoader(
            data, sampler=order, batch_size=work.batch_size
        )
        names = ("logger", "enable_progress_bar", "enable_checkpointing")
        off = dict.fromkeys((*names, "enable_model_summary"), False)

    def run_with(fused: bool) -> Callable[[int], int]:
        def run(steps: int) -> int:
            how = {"max_steps": steps, "max_epochs": -1, "accelerator": "cpu"}
            lightning.Trainer(**how, **off).fit(_make_module(work, fused), loader)
            return steps

        return run

    return run_with(_choose(run_with))


def _choose(run_with: Callable[[bool], Callable[[int], int]]) -> bool:
    """Set the faster number of threads; return whether the fused Adam is faster."""
    import torch

    found = {}
    for threads, fused in itertools.product({1, torch.get_num_threads()}, (0, 1)):
        torch.set_num_threads(threads)
        run = run_with(bool(fused))
        run(20)
        began = time.perf_counter()
        run(100)
        found[time.perf_counter() - began] = threads, bool(fused)
    threads, fused = found[min(found)]
    torch.set_num_threads(threads)
    return fused


def _to_torch(x: np.ndarray, y: np.ndarray) -> Any:
    import torch

    y = y if y.dtype == np.float32 else y.astype(np.int64)
    return torch.from_numpy(x), torch.from_numpy(y)


def _make_loss(work: Work) -> Any:
    from torch import nn

    return nn.CrossEntropyLoss() if work.classifies else nn.MSELoss()


def _make_net(work: Work) -> Any:
    from torch import nn

    if work.convolutions:
        convolutions = nn.Conv2d(1, 8, 3, 2, 1), nn.Conv2d(8, 16, 3, 2, 1)
        first, second = convolutions
        end = nn.Flatten(), nn.Linear(784, 10)
        return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), *end)
    layers = []
    for size, following in itertools.pairwise(work.sizes):
        layers += [nn.Linear(size, following), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _make_module(work: Work, fused: bool) -> Any:
    import lightning
    import torch

    loss_of = _make_loss(work)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = _make_net(work)

        def training_step(self, batch: Any, number: int) -> Any:
            del number
            x, y = batch
            return loss_of(self.net(x), y)

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=RATE, fused=fused)

    return Module()
