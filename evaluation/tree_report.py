"""What trees get along known answers, as figures and tables: tokens a pass, coverage by depth, who proposed what."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from ..candidate_generator.text_continuation import PRIORS
from ..candidate_generator.token_tree import SOURCES
from .paper_tables import NOTHING, markdown
from .tree_replay import WITH_TEXT, WITHOUT_TEXT, TreeTrace

Rows = Sequence[Mapping[str, Any]]


def tree_view(sets: Mapping[str, Rows], walks: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Figures of trees over answers; empty for rows without.

    Args:
        sets: rows of answers by set, with `trees` by drafter, kind and nodes, and maybe `lookup` and `suffixes`.
        walks: tokens a pass of a drafter's own draft, by drafter and set.

    Returns:
        `trees`: by drafter its `walk` and its trees by kind and nodes; `lookup`: by nodes; `suffixes`: by matched
        tokens how often they were `right` and `asked`. A tree's figures are tokens a pass by set (`sets`) and on
        `average`, and over all sets shares of passes (`drafts`, and `reached` by depth), mean `nodes` by depth, and
        shares of committed tokens (`sources`).
    """
    first = next(iter(sets.values()))[0]
    if "trees" not in first:
        return {}
    trees: dict[str, Any] = {}
    for drafter, kinds in first["trees"].items():
        trees[drafter] = {"walk": {"sets": dict(walks[drafter]), "average": fmean(walks[drafter].values())}}
        for kind, counts in kinds.items():
            trees[drafter][kind] = {
                count: _figures(
                    {name: [row["trees"][drafter][kind][count] for row in part] for name, part in sets.items()}
                )
                for count in counts
            }
    view: dict[str, Any] = {"trees": trees}
    if "lookup" in first:
        view["lookup"] = {
            count: _figures({name: [row["lookup"][count] for row in part] for name, part in sets.items()})
            for count in first["lookup"]
        }
        rows = [row for part in sets.values() for row in part]
        view["suffixes"] = {}
        for length in first["suffixes"]:
            right, asked = (sum(row["suffixes"][length][part] for row in rows) for part in (0, 1))
            view["suffixes"][length] = {"right": right, "asked": asked}
    return view


def _figures(sets: Mapping[str, Iterable[Mapping[str, Any]]]) -> dict[str, Any]:
    by_set, whole = {}, TreeTrace()
    for name, traces in sets.items():
        pooled = TreeTrace()
        for trace in traces:
            pooled.add(TreeTrace(**trace))
        by_set[name] = pooled.tokens_per_pass
        whole.add(pooled)
    return {
        "sets": by_set,
        "average": fmean(by_set.values()),
        "drafts": whole.drafts / whole.passes,
        "reached": [count / whole.passes for count in whole.reached],
        "nodes": [count / whole.passes for count in whole.nodes],
        "sources": {source: whole.sources.get(source, 0) / whole.committed for source in SOURCES},
    }


def tree_tables(view: Mapping[str, Any]) -> dict[str, str]:
    """Tables in Markdown by title; none for a view without trees."""
    tables: dict[str, str] = {}
    for drafter, figures in view.get("trees", {}).items():
        walk = figures["walk"]["average"]
        kinds = {kind: figures[kind] for kind in (WITHOUT_TEXT, WITH_TEXT) if kind in figures}
        columns = kinds | ({"lookup alone": view["lookup"]} if "lookup" in view else {})
        rows = [
            [count, *(f"{column[count]['average']:.2f}" for column in columns.values())]
            for count in figures[WITHOUT_TEXT]
        ]
        title = f"Tokens a pass of `{drafter}` by nodes of a tree, averages over sets; its own draft: {walk:.2f}"
        tables[title] = markdown(["Nodes", *columns], rows, text_columns=0)
        tables[
            f"Share of passes in which the trees of `{drafter}` hold the text to a depth (and their nodes there)"
        ] = _coverage(kinds)
        tables[f"Tokens that trees of `{drafter}` commit, by who proposed them"] = _sources(kinds)
    if "suffixes" in view:
        rows = []
        for length, each in view["suffixes"].items():
            share = f"{each['right'] / each['asked']:.2f}" if each["asked"] else NOTHING
            rows.append([length, share, f"{PRIORS[int(length)]:.2f}", str(each["asked"])])
        tables["How often the text went on as it did behind an equal suffix"] = markdown(
            ["Tokens of the suffix", "right", "assumed", "asked"], rows, text_columns=0
        )
    return tables


def _coverage(kinds: Mapping[str, Mapping[str, Any]]) -> str:
    rows = []
    for kind, counts in kinds.items():
        for count, figures in counts.items():
            reached, nodes = figures["reached"], figures["nodes"]
            reached = [*reached, *[0.0] * (len(nodes) - len(reached))]
            cells = [f"{share:.2f} ({each:.1f})" for share, each in zip(reached, nodes, strict=True)]
            rows.append([kind, count, *cells])
    depths = max(map(len, rows)) - 2
    header = ["", "Nodes", *map(str, range(1, depths + 1))]
    return markdown(header, [[*row, *[""] * (depths + 2 - len(row))] for row in rows])


def _sources(kinds: Mapping[str, Mapping[str, Any]]) -> str:
    rows = []
    for kind, counts in kinds.items():
        for count, figures in counts.items():
            shares = figures["sources"]
            own = 1 - sum(shares.values())
            rows.append(
                [
                    kind,
                    count,
                    *(f"{shares[source]:.1%}" for source in SOURCES),
                    f"{own:.1%}",
                    f"{figures['drafts']:.1%}",
                ]
            )
    return markdown(["", "Nodes", *SOURCES, "target", "passes with a draft"], rows)
