"""`accelerate launch -m lilicorr.training RECIPE --data … --output …`, with the options of `lilicorr train`."""

import typer

from .command import train

if __name__ == "__main__":
    typer.run(train)
