"""`accelerate launch -m lilicorr.training RECIPE --data … --output …`, with the options of `lilicorr train`."""

import typer

from ..hub.terminal import print_in_any_encoding
from .command import train

if __name__ == "__main__":
    print_in_any_encoding()
    typer.run(train)
