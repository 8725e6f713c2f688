"""The command line of the Hub: `lilicorr publish` and `lilicorr verify`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .sources import check_files, check_model, check_online, check_reachable
from .terminal import loading, one_sentence, waiting

MEGABYTE = 1 << 20


def publish(
    checkpoint: Annotated[str, typer.Argument(help="Folder of a drafter, as training and save_pretrained write.")],
    repository: Annotated[str, typer.Argument(help="owner/name on the Hub, made if it is not there.")],
    private: Annotated[bool, typer.Option("--private", help="For a repository that nobody else sees.")] = False,
    revision: Annotated[str, typer.Option("--revision", "--branch", help="Branch, made if it is not there.")] = "",
    message: Annotated[str, typer.Option("--commit-message", "-m", help="Of the commit.")] = "",
    max_shard_size: Annotated[str, typer.Option(help="Of one weight file: 5GB, 200MB.")] = "5GB",
    head_only: Annotated[bool, typer.Option("--head-only", help="The head without its backbone.")] = False,
    backbone: Annotated[str, typer.Option(help="DFlash repository that --head-only was trained on, frozen.")] = "",
    backbone_revision: Annotated[str, typer.Option(help="Branch, tag or commit of --backbone.")] = "",
    results: Annotated[str, typer.Option(help="report.json of `lilicorr evaluate` on this checkpoint.")] = "",
    license: Annotated[str, typer.Option(help="Identifier of the weights' licence.")] = "apache-2.0",
    language: Annotated[list[str] | None, typer.Option(help="ISO 639 code; may be given several times.")] = None,
    dataset: Annotated[list[str] | None, typer.Option(help="Data set it learned from, by its name on the Hub.")] = None,
    tag: Annotated[list[str] | None, typer.Option(help="Further tag of the card.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the files; ask and send nothing.")] = False,
) -> None:
    """Upload a drafter as a complete repository, code and card included. The same command again resumes."""
    out = Console()
    with one_sentence():
        if not Path(checkpoint).is_dir():
            raise ValueError(f"The checkpoint {checkpoint} is no folder; give the folder of a drafter.")
        check_model("drafter", checkpoint)
        check_files([results] if results else [])
        if head_only != bool(backbone) or (backbone_revision and not backbone):
            raise ValueError("--head-only and --backbone belong together; give both, or neither for a whole drafter.")
        if not dry_run:
            check_online()
        with loading("Looking at the checkpoint", checkpoint):
            from .hub_calls import check_repo_id
            from .publish import Backbone, CardFacts, Destination, check_destination, send, sizes, staged_repository

            check_repo_id(repository)
            place = Destination(repository, private or None, revision or None, message or None)
            if not dry_run:
                check_destination(place)
            facts = CardFacts(license, language or (), dataset or (), tag or (), results)
            frozen = Backbone(backbone, backbone_revision or None, dry_run) if backbone else None
        with staged_repository(checkpoint, repository, facts, max_shard_size, frozen) as files:
            found = sizes(files)
            if dry_run:
                for name, size in found.items():
                    out.print(f"{size:>13,}  {name}", markup=False, highlight=False, soft_wrap=True)
                where = f"{repository}{f' at {revision}' if revision else ''}"
                total = f"{len(found)} files, {sum(found.values()):,} bytes, would go to {where}"
                out.print(total, markup=False, highlight=False, soft_wrap=True)
                return
            with waiting(f"Uploading {len(found)} files, {sum(found.values()) / MEGABYTE:,.1f} MB", still=True):
                made = send(files, place)
    out.print(f"{made.commit_url}", markup=False, highlight=False, soft_wrap=True)
    pinned = f'AutoModel.from_pretrained("{repository}", revision="{made.oid}", trust_remote_code=True)'
    if head_only:
        pinned = f'LiLiCorrModel.from_dflash("{backbone}", head="{repository}", head_revision="{made.oid}")'
    out.print(pinned, markup=False, highlight=False, soft_wrap=True)


def verify(
    source: Annotated[str, typer.Argument(help="Folder of a drafter, or its repository.")],
    revision: Annotated[str, typer.Option("--revision", help="Branch, tag or commit of a repository.")] = "",
) -> None:
    """Compare a drafter's code with the installed release, file by file; nothing of it is imported or run."""
    out = Console()
    with one_sentence():
        check_model("drafter", source)
        from .verify import verify_folder, verify_repository

        if Path(source).is_dir():
            if revision:
                raise ValueError(f"--revision is {revision}, but {source} is a folder; leave it out.")
            verdict, commit = verify_folder(source), ""
        else:
            check_reachable("drafter", source)
            verdict, commit = verify_repository(source, revision or None)
    counts = []
    for kind in ("equal", "differing", "unknown", "missing"):
        names = getattr(verdict, kind)
        counts.append(f"{len(names)} {kind}")
        for name in names:
            printable = "".join(letter if letter.isprintable() else "?" for letter in name)
            out.print(f"{kind:<10} {printable}", markup=False, highlight=False, soft_wrap=True)
    what = "the code is that of the installed release" if verdict.ok else "not the code of the installed release"
    where = f" (commit {commit})" if commit else ""
    out.print(f"{', '.join(counts)}: {what}{where}", markup=False, highlight=False, soft_wrap=True)
    if not verdict.ok:
        raise typer.Exit(1)
