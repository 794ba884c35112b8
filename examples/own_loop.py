"""A training loop of one's own on MNIST, as PyTorch people write it; two lines are Offbeat's.

    python examples/own_loop.py --epochs 1                        # alone, with plain PyTorch
    offbeat launch --workers 4 --servers 2 --discipline bounded:2 examples/own_loop.py --epochs 1
    offbeat compare --disciplines sync,bounded:2 --workers 4 -- examples/own_loop.py --epochs 1

A script that dies and is started again goes on with the epoch that it was in.
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import offbeat


def load(name: str, folder: str) -> tuple[TensorDataset, TensorDataset]:
    train, test = (
        TensorDataset(images.float() / 255, labels)
        for images, labels in offbeat.load_dataset(name, folder)
    )
    return train, test


def make_model() -> nn.Module:
    features = [nn.Conv2d(1, 16, 5), nn.ReLU(), nn.MaxPool2d(2)]  # [b, 16, 12, 12]
    features += [nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2)]  # [b, 32, 4, 4]
    return nn.Sequential(*features, nn.Flatten(), nn.Dropout(0.25), nn.Linear(512, 10))


def train_epoch(model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader) -> None:
    model.train()
    for number, (images, labels) in enumerate(loader):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        offbeat.log(loss=loss.item())
        optimizer.step()
        if number % 100 == 0:
            print(f"batch {number} of {len(loader)}: loss {loss.item():.3f}", flush=True)


@torch.no_grad()
def test(model: nn.Module, loader: DataLoader) -> float:
    model.eval()
    right = sum((model(images).argmax(1) == labels).sum().item() for images, labels in loader)
    return right / len(loader.dataset)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--data", default="mnist", help="or fashion-mnist-sample, which is here")
    parser.add_argument("--data-dir", default="data")
    options = parser.parse_args()

    torch.manual_seed(offbeat.seed())
    train_data, test_data = load(options.data, options.data_dir)
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    optimizer = offbeat.distribute(model, optimizer)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.7)
    sampler = offbeat.Sampler(train_data)
    loader = DataLoader(train_data, options.batch_size, sampler=sampler)
    state = offbeat.State(epoch=0, schedule=schedule.state_dict())
    schedule.load_state_dict(state.schedule)
    for epoch in range(state.epoch, options.epochs):
        sampler.set_epoch(epoch)
        train_epoch(model, optimizer, loader)
        schedule.step()
        state.keep(epoch=epoch + 1, schedule=schedule.state_dict())
        if offbeat.is_master():
            accuracy = test(model, DataLoader(test_data, 1000))
            offbeat.log(accuracy=accuracy)  # what a run is judged by
            print(f"epoch {epoch + 1}: test accuracy {accuracy:.4f}", flush=True)


if __name__ == "__main__":
    main()
