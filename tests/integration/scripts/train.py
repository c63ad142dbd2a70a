"""An ordinary training script, which writes its results to a given path.

``python``, ``torchrun`` and ``notebook_launcher`` run it unchanged.
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nblaunch import Accelerator
from nblaunch.utils import set_seed


def main(path: str) -> dict[str, float]:
    accelerator = Accelerator(split_batches=True, gradient_accumulation_steps=2)
    set_seed(11)
    # In double precision, so that the order of summation makes no visible difference.
    inputs = torch.randn(52, 5, dtype=torch.float64)
    dataset = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True).sin())
    module = nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 1)).double()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=9, gamma=0.5)
    loader = DataLoader(
        dataset, batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(3), drop_last=True
    )
    test = DataLoader(dataset, batch_size=8)
    model, optimizer, scheduler, loader, test = accelerator.prepare(
        module, optimizer, scheduler, loader, test
    )

    for _epoch in range(3):
        model.train()
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward((model(inputs) - targets).square().mean())
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    model.eval()
    errors = []
    for inputs, targets in test:
        with torch.no_grad():
            errors.append(accelerator.gather_for_metrics((model(inputs) - targets).square()))
    metrics = {"error": torch.cat(errors).mean().item(), "rows": sum(map(len, errors))}
    if accelerator.is_main_process:
        weights = accelerator.unwrap_model(model).state_dict()
        torch.save({**metrics, "weights": weights, "num_processes": accelerator.num_processes}, path)
    accelerator.end_training()
    return metrics


if __name__ == "__main__":
    main(sys.argv[1])
