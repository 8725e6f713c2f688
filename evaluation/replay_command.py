"""The command line of the replay: `lilicorr replay`."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ..hub.sources import check_files, check_models
from ..hub.targets import smollm2
from ..hub.terminal import loading, one_sentence, tracked
from .command import ROWS
from .files import writable
from .journal import Journal
from .metrics import loops
from .names import named_folders
from .sets import jsonl_files

if TYPE_CHECKING:  # what needs torch is imported when the command line has been understood
    from .loading import Pair
    from .replay import Text

NODES = (3, 7, 15, 31, 63)
LACK = "give --answers what `lilicorr regenerate` wrote"


def replayed(
    answers: Annotated[
        list[str], typer.Option(help="Folder of JSONL files of `lilicorr regenerate`, one a set, or such a file.")
    ],
    drafter: Annotated[list[str], typer.Option(help="name=folder (or repository); the first is what others change.")],
    output: Annotated[Path, typer.Option(help="Folder for the rows, report.json and report.md.")],
    target: Annotated[str, typer.Option(help="Folder or repository of the target; unset: SmolLM2-135M-Instruct.")] = "",
    num_assistant_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens drafted at a time, as in generate; 0: whole blocks.")
    ] = 0,
    nodes: Annotated[
        str | None,
        typer.Option(
            help="Nodes of the trees to follow the answers with besides, 0 for none; unless given "
            f"{','.join(map(str, NODES))}, and none with --num-assistant-tokens."
        ),
    ] = None,
    lookup: Annotated[
        bool, typer.Option("--lookup/--no-lookup", help="Also trees with the text's own continuation, and it alone.")
    ] = True,
    max_length: Annotated[int, typer.Option(min=2, help="Texts are cut to this many tokens.")] = 3072,
    dtype: Annotated[str, typer.Option(help="auto, fp32, bf16 or fp16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, …")] = "auto",
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run code the models bring.")] = False,
) -> None:
    """Measure acceptance along answers that are already there, of chains and trees: untimed, the same text for all.

    The same command again resumes a stopped run.
    """
    with one_sentence():
        folders, files = named_folders(drafter), jsonl_files(answers, LACK)
        check_files(files.values())
        counts = node_counts(nodes, num_assistant_tokens)
        if output.is_file() or not writable(output):
            raise ValueError(f"--output {output} cannot be written; name a folder that can.")
        check_models(target, folders.values(), dtype)
        source = target or str(smollm2())
        with loading("Loading target, drafters and answers", source, *folders.values()):
            from .loading import load_pair
            from .machine import models
            from .replay_report import replay_report, write_replay_report

            pair = load_pair(source, folders, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
            texts = dict(texts_of(files, pair, max_length))
            settings = models(pair, target or "SmolLM2-135M-Instruct", folders, source)
        settings |= {"num_assistant_tokens": num_assistant_tokens, "nodes": counts, "lookup": lookup}
        journal = Journal(output / ROWS, settings)
        for key, (name, text) in tracked(texts.items(), "answers"):
            if key not in journal.rows:
                journal.add({"key": key, "set": name, **replay_row(pair, text, num_assistant_tokens, counts, lookup)})
        rows = [_whole(journal.rows[key], folders, counts, lookup) for key in texts]
        path = write_replay_report(output, replay_report(journal.settings, rows))
    Console().print(f"report in {path}", markup=False, soft_wrap=True)


def texts_of(files: dict[str, Path], pair: "Pair", max_length: int) -> "Iterator[tuple[str, tuple[str, Text]]]":
    """Every answer of `files` with its set, by a key that changes with its tokens.

    Raises:
        ValueError: a file is broken or holds no answer.
    """
    from ..training.data import load_examples
    from ..training.decode import stop_ids
    from .replay import answers_in

    ends = stop_ids(pair.target)
    for name, file in files.items():
        for example in load_examples([file], pair.tokenizer, max_length):
            for text in answers_in(example.input_ids, example.loss_mask, ends):
                digest = hashlib.sha256(repr((text.token_ids, text.start, text.end)).encode()).hexdigest()[:12]
                yield f"{name}/{example.id}/{digest}", (name, text)


def node_counts(text: str | None, num_assistant_tokens: int) -> list[int]:
    """The nodes that `--nodes` names, ascending.

    Raises:
        ValueError: it is no list of whole numbers, or trees are asked for of shortened drafts.
    """
    if text is None:
        return [] if num_assistant_tokens else list(NODES)
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"--nodes is {text!r}, expected whole numbers with commas between, such as 7,15,31.")
    counts = sorted({int(part) for part in parts} - {0})
    if counts and num_assistant_tokens:
        raise ValueError("--nodes grows trees of whole blocks; leave out --num-assistant-tokens, or give --nodes 0.")
    return counts


def replay_row(
    pair: "Pair", text: "Text", num_assistant_tokens: int = 0, nodes: Sequence[int] = (), lookup: bool = True
) -> dict[str, Any]:
    """One answer's row: whether it loops, every drafter's traces by rule (0 drafts whole blocks), and what trees get.

    Args:
        nodes: of the trees to follow the answer with; lookup: also with the text's own continuation, and it alone.
    """
    import torch

    from ..training.decode import stop_ids
    from ..training.target import target_pass
    from .replay import drafts_along, walks
    from .tree_replay import WITH_TEXT, WITHOUT_TEXT, Drafts, follow_trees, suffix_hits

    ids = torch.tensor([text.token_ids[: text.end]], device=pair.target.device)
    target_hidden: dict[tuple[int, ...], torch.Tensor] = {}  # drafters mostly share their layers, and so one pass
    made: dict[str, Any] = {}
    trees: dict[str, Any] = {}
    ends = stop_ids(pair.target)
    for name, drafter in pair.drafters.items():
        layers = tuple(drafter.config.target_layer_ids)
        if layers not in target_hidden:
            target_hidden[layers] = target_pass(pair.target, ids, layers)[0]
        drafts = drafts_along(pair.target, drafter, text, target_hidden[layers], num_assistant_tokens)
        made[name] = {rule: asdict(trace) for rule, trace in walks(text, drafts).items()}
        if not nodes:
            continue
        known = Drafts(drafter, drafts)
        trees[name] = {
            kind: {str(count): asdict(follow_trees(text, count, known, kind == WITH_TEXT, ends)) for count in nodes}
            for kind in ((WITHOUT_TEXT, WITH_TEXT) if lookup else (WITHOUT_TEXT,))
        }
    row: dict[str, Any] = {"loops": loops(text.token_ids[text.start : text.end]), "drafters": made}
    if nodes:
        row["trees"] = trees
    if nodes and lookup:
        row["lookup"] = {str(count): asdict(follow_trees(text, count, None, True, ends)) for count in nodes}
        row["suffixes"] = {str(length): counted for length, counted in suffix_hits(text).items()}
    return row


def _whole(row: dict[str, Any], drafters: dict[str, str], nodes: Sequence[int], lookup: bool) -> dict[str, Any]:
    """`row`, if it holds what rows hold.

    Raises:
        ValueError: it does not.
    """
    made, wanted = row.get("drafters"), {"set", "loops"}
    if nodes:
        wanted |= {"trees", "lookup", "suffixes"} if lookup else {"trees"}
    if not isinstance(made, dict) or set(made) != set(drafters) or not wanted <= set(row):
        raise ValueError(f"The row {row['key']!r} of {ROWS} is no row of a replay; remove it.")
    return row
