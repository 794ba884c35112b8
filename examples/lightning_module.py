"""A Lightning module whose optimizer is distributed: nothing else of the script is changed but who
gets which data. `pip install 'offbeat[lightning]'` brings Lightning.

    python examples/lightning_module.py                           # alone
    offbeat launch --workers 2 examples/lightning_module.py       # each with half the data

Every worker is a Lightning trainer of its own, with one device, and knows nothing of the others.
"""

import argparse

import lightning
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import offbeat


class Classifier(lightning.LightningModule):
    def __init__(self, lr: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        features = [nn.Conv2d(1, 8, 5), nn.ReLU(), nn.MaxPool2d(4)]  # [b, 8, 6, 6]
        self.layers = nn.Sequential(*features, nn.Flatten(), nn.Linear(288, 10))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = F.cross_entropy(self.layers(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        right = (self.layers(batch[0]).argmax(dim=1) == batch[1]).float().mean()
        self.log("accuracy", right, prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        optimizer = offbeat.distribute(self, optimizer)  # Offbeat's
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.7)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--data", default="fashion-mnist-sample", help="or mnist, fashion-mnist")
    parser.add_argument("--data-dir", default="data")
    options = parser.parse_args()

    lightning.seed_everything(1)
    train_data, test_data = (
        TensorDataset(images.float() / 255, labels)
        for images, labels in offbeat.load_dataset(options.data, options.data_dir)
    )
    sampler = offbeat.Sampler(train_data)  # Offbeat's: was shuffle=True
    loader = DataLoader(train_data, 64, sampler=sampler)
    trainer = lightning.Trainer(
        max_epochs=options.epochs,
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=offbeat.is_master(),
    )
    trainer.fit(Classifier(options.lr), loader, DataLoader(test_data, 1000))
    if offbeat.is_master():
        print(f"accuracy {trainer.callback_metrics['accuracy'].item():.4f}")


if __name__ == "__main__":
    main()
