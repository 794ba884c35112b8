"""A transformers Trainer whose optimizer is distributed: a tiny GPT-2, made from a configuration,
learns to write numbers in words. `pip install 'offbeat[transformers]'` brings the library.

    python examples/transformers_trainer.py                           # alone
    offbeat launch --workers 2 examples/transformers_trainer.py       # each with half the data

Every worker is a Trainer of its own, with one device, and knows nothing of the others.
"""

import argparse
import tempfile

import torch
from torch.utils.data import Dataset, Subset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import offbeat

ONES = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
ONES += "fifteen sixteen seventeen eighteen nineteen"
TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
LENGTH = 32  # of a line: 471 four hundred seventy one
LETTERS = "\n 0123456789" + "".join(sorted({*ONES, *"hundred", *TENS} - {" "}))


def in_words(number: int) -> str:
    if number >= 100:
        rest = f" {in_words(number % 100)}" if number % 100 else ""
        return f"{in_words(number // 100)} hundred{rest}"
    if number >= 20:
        rest = f" {in_words(number % 10)}" if number % 10 else ""
        return TENS.split()[number // 10 - 2] + rest
    return ONES.split()[number]


class Lines(Dataset):
    """The line of each number below 1000, letter by letter; what is behind its end is no label."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        line = f"{number} {in_words(number)}\n".ljust(LENGTH, "\n")
        letters = torch.tensor([LETTERS.index(letter) for letter in line])
        labels = letters.clone()
        labels[line.index("\n") + 1 :] = -100
        return {"input_ids": letters, "labels": labels}


def make_model() -> GPT2LMHeadModel:
    sizes = {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": LENGTH}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=len(LETTERS), **sizes, **ends))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=float, default=10)
    parser.add_argument("--lr", type=float, default=3e-3)
    options = parser.parse_args()

    set_seed(1)
    order = torch.randperm(1000).tolist()
    held_out, rest = Subset(Lines(), order[:100]), order[100:]
    mine = Subset(Lines(), rest[offbeat.rank() :: offbeat.world_size()])  # Offbeat's: was rest
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    optimizer = offbeat.distribute(model, optimizer)  # Offbeat's
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            num_train_epochs=options.epochs,
            per_device_train_batch_size=25,
            logging_steps=50,
            save_strategy="no",
            report_to="none",
            disable_tqdm=not offbeat.is_master(),
        )
        trainer = Trainer(
            model,
            arguments,
            train_dataset=mine,
            eval_dataset=held_out,
            optimizers=(optimizer, None),
        )
        trainer.train()
        if offbeat.is_master():
            print(f"loss {trainer.evaluate()['eval_loss']:.4f} on numbers that it has not seen")


if __name__ == "__main__":
    main()
