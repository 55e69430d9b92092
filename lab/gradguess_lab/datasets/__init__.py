"""The registry of data sets. To add one, write a file here with its `SOURCE` and add one line to `DATASETS`."""

from gradguess_lab.datasets import cifar10, digits, fashion_mnist, mnist, mnist1d, mnist5k, shakespeare
from gradguess_lab.datasets.source import Source

DATASETS: dict[str, Source] = {
    "mnist1d": mnist1d.SOURCE,
    "digits": digits.SOURCE,
    "mnist5k": mnist5k.SOURCE,
    "mnist": mnist.SOURCE,
    "fashion-mnist": fashion_mnist.SOURCE,
    "cifar10": cifar10.SOURCE,
    "shakespeare": shakespeare.SOURCE,
}

__all__ = ["DATASETS"]
