"""The command line of training: `lilicorr train`, and `python -m lilicorr.training` under `accelerate launch`."""

import os
from typing import Annotated

import typer
from rich.console import Console
from safetensors import SafetensorError

from ..hub.sources import check_files, check_models
from ..hub.targets import TargetUnavailableError, smollm2
from .recipe_files import find_recipe


def train(
    recipe: Annotated[str, typer.Argument(help="YAML file of settings, or a recipe's name such as qwen3-8b.")],
    data: Annotated[list[str], typer.Option(help="JSONL file of `lilicorr regenerate`; may be given several times.")],
    output: Annotated[str, typer.Option(help="Folder for the checkpoint, the log and the states to resume from.")],
    target: Annotated[
        str, typer.Option(help="Folder or repository of the target; unset: the recipe's, or SmolLM2-135M-Instruct.")
    ] = "",
    init: Annotated[str, typer.Option(help="Checkpoint folder to start from.")] = "",
    states: Annotated[str, typer.Option(help="Folder that keeps the target's states; unset: run it every step.")] = "",
    head: Annotated[str, typer.Option(help="Type of head; unset: the recipe's.")] = "",
    seed: Annotated[int | None, typer.Option(help="Of weights, order and blocks; unset: the recipe's.")] = None,
    steps: Annotated[int, typer.Option(min=0, help="Optimiser steps; 0: as the recipe says.")] = 0,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Another setting of the recipe, such as objective.penalty=0."),
    ] = None,
    tracker: Annotated[
        list[str] | None, typer.Option(help="Also log to this tracker of accelerate, such as tensorboard.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Stop at a row of data that cannot be used.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what the run needs and sees; load no weights.")
    ] = False,
) -> None:
    """Train drafter and head jointly. The same command again resumes a stopped run."""
    try:
        check_files([find_recipe(recipe), *data])
        check_models(target, [init] if init else [])
    except (ValueError, OSError) as error:
        raise _stop(sentence(error)) from None
    try:
        from .dry_run import describe
        from .interruption import Interrupted
        from .settings import TrainSettings
        from .train import train as run
    except ModuleNotFoundError as error:
        raise _stop(f"Training needs {error.name}: pip install 'lilicorr[train]'.") from None
    given = {"target": target, "init": init, "states": states, "steps": steps, "trackers": tracker, "head_type": head}
    given["strict"] = strict
    overrides = {name: value for name, value in given.items() if value}
    overrides |= {} if seed is None else {"seed": seed}
    try:
        settings = TrainSettings.from_recipe(
            recipe, default_target=smollm2, changes=changes or (), data=data, output=output, **overrides
        )
        check_models(settings.target, [])
        if dry_run:
            print(describe(settings))
            return
        finished = run(settings)
    except Interrupted as stopped:
        raise _stop(str(stopped), stopped.exit_code) from None
    except (ValueError, OSError, TargetUnavailableError) as error:
        raise _stop(sentence(error)) from None
    except (RuntimeError, SafetensorError) as error:
        said = f"The run failed: {sentence(error)}"
        hint = "; --dry-run says how much it needs." if "memory" in said else ""
        raise _stop(said + hint) from error
    if _process() == 0:
        Console().print(f"checkpoint in {finished}", markup=False)


def sentence(error: Exception) -> str:
    """What went wrong, with the file it went wrong with first."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}; give another path."
    return " ".join(str(error).split())


def _process() -> int:
    """Which of the processes of `accelerate launch` this is."""
    return int(os.environ.get("RANK", "0"))


def _stop(message: str, code: int = 1) -> typer.Exit:
    """Print one sentence on stderr, with the process if it is not the first; raise what this returns."""
    where = f"process {_process()}: " if _process() else ""
    Console(stderr=True).print(where + message, style="red", markup=False, soft_wrap=True)
    return typer.Exit(code)
