"""The script that most people's first PyTorch program was: a small convnet on MNIST, with Adadelta
and a rate that falls after every epoch. Two lines, marked below, make it Offbeat's as well.

    python examples/mnist_script.py --epochs 3                            # alone, plain PyTorch
    offbeat launch --workers 2 examples/mnist_script.py --epochs 3        # each with half the data
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import offbeat

MEAN, DEVIATION = 0.13, 0.31  # of MNIST's pixels


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3), nn.ReLU()
        )
        self.classifier = nn.Sequential(
            nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.25), nn.Linear(800, 64), nn.ReLU()
        )
        self.out = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        return F.log_softmax(self.out(self.classifier(self.features(images))), dim=1)


def train(options: argparse.Namespace, model, device, loader, optimizer, epoch: int) -> None:
    model.train()
    for number, (images, labels) in enumerate(loader):
        images, labels = images.to(device), labels.to(device)
        optimizer.zero_grad()
        loss = F.nll_loss(model(images), labels)
        loss.backward()
        optimizer.step()
        if number % options.log_interval == 0:
            print(f"epoch {epoch}, batch {number} of {len(loader)}: loss {loss.item():.4f}")


@torch.no_grad()
def test(model, device, loader) -> None:
    model.eval()
    loss, right, count = 0.0, 0, len(loader.dataset)
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        scores = model(images)
        loss += F.nll_loss(scores, labels, reduction="sum").item()
        right += (scores.argmax(dim=1) == labels).sum().item()
    print(f"test: mean loss {loss / count:.4f}, accuracy {right} of {count} ({right / count:.1%})")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A small convnet on MNIST")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--test-batch-size", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=14)
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--gamma", type=float, default=0.7, help="the rate's factor per epoch")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-interval", type=int, default=100, help="in batches")
    parser.add_argument("--no-cuda", action="store_true")
    parser.add_argument("--save-model", action="store_true", help="write mnist.pt in the end")
    parser.add_argument("--data", default="mnist", help="or fashion-mnist-sample, which is here")
    parser.add_argument("--data-dir", default="data")
    return parser.parse_args()


def main() -> None:
    options = parse()
    torch.manual_seed(options.seed)
    device = torch.device("cuda" if torch.cuda.is_available() and not options.no_cuda else "cpu")
    train_data, test_data = (
        TensorDataset((images / 255 - MEAN) / DEVIATION, labels)
        for images, labels in offbeat.load_dataset(options.data, options.data_dir)
    )
    sampler = offbeat.Sampler(train_data, seed=options.seed)  # Offbeat's: was shuffle=True
    loader = DataLoader(train_data, options.batch_size, sampler=sampler)
    test_loader = DataLoader(test_data, options.test_batch_size)

    model = Net().to(device)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=options.lr)
    optimizer = offbeat.distribute(model, optimizer)  # Offbeat's
    scheduler = StepLR(optimizer, step_size=1, gamma=options.gamma)
    for epoch in range(1, options.epochs + 1):
        train(options, model, device, loader, optimizer, epoch)
        test(model, device, test_loader)
        scheduler.step()
    if options.save_model and offbeat.is_master():
        torch.save(model.state_dict(), "mnist.pt")


if __name__ == "__main__":
    main()
