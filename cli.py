"""`lilicorr <verb>`: each verb parses its arguments, calls one room, and prints."""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from .evaluation.command import evaluate
from .evaluation.files import writable, write_text
from .evaluation.replay_command import replayed
from .hub.command import publish, verify
from .hub.precision import check_dtype
from .hub.sources import check_files, check_models
from .hub.targets import TargetUnavailableError, smollm2
from .hub.terminal import as_text, loading, one_sentence, print_in_any_encoding, waiting
from .hub.terminal import stop as _stop
from .training.command import sentence, train

if TYPE_CHECKING:  # what needs torch is imported when the command line has been understood
    from .evaluation.loading import Pair

EMBEDDED_DRAFTER = Path(__file__).parent / "hub" / "checkpoints" / "lilicorr-smollm2-135m-instruct"
DEMO_PROMPTS = [
    "A shelf holds 12 books. I take 3 away, then put 5 new ones on it. How many books are there? Show each step.",
    "Write a Python function that returns the n-th Fibonacci number, and explain it.",
    "Explain in simple words why the sky is blue.",
]

UsageError: Any = typer.BadParameter.__mro__[1]  # click's, or typer's own copy of it


class Verbs(TyperGroup):
    """The verbs: what is wrong with a command line is one sentence, and consoles of any encoding can print it."""

    def main(self, args: Sequence[str] | None = None, *rest: Any, **options: Any) -> Any:
        """Run a verb; typer's own `main` with that."""
        print_in_any_encoding()
        try:
            return super().main(as_text(sys.argv[1:] if args is None else args), *rest, **options)
        except ValueError as error:
            raise SystemExit(_stop(error).exit_code) from None

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Read the options before a verb."""
        return _one_sentence_usage(lambda: super(Verbs, self).make_context(info_name, args, parent, **extra))

    def invoke(self, ctx: Any) -> Any:
        """Run the verb that `ctx` names."""
        return _one_sentence_usage(lambda: super(Verbs, self).invoke(ctx))


def _one_sentence_usage(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except UsageError as error:
        if not error.format_message():  # no arguments at all: the help says it
            raise
        command = error.ctx.command_path if error.ctx else "lilicorr"
        raise _stop(f"{error.format_message().rstrip('.')}; see {command} --help.", 2) from None


app = typer.Typer(cls=Verbs, no_args_is_help=True, pretty_exceptions_show_locals=False)
console = Console()

Prompts = Annotated[list[str] | None, typer.Option("--prompt", help="A user message; may be given several times.")]
NewTokens = Annotated[int, typer.Option("--max-new-tokens", min=1, help="Tokens of each answer at most.")]
Dtype = Annotated[
    str, typer.Option(help="auto, fp32, bf16 or fp16; auto is bf16 only where the hardware is fast at it.")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, …")]


@app.callback()
def lilicorr() -> None:
    """Lossless speculative decoding inside Transformers."""


@app.command()
def demo(
    prompt: Prompts = None,
    drafter: Annotated[
        Path, typer.Option(help="A drafter of SmolLM2-135M-Instruct to use instead.")
    ] = EMBEDDED_DRAFTER,
    max_new_tokens: NewTokens = 128,
    dtype: Annotated[str, typer.Option(help="auto, fp32, bf16 or fp16; in fp32 outputs are equal.")] = "fp32",
    device: Device = "auto",
) -> None:
    """Answer a few prompts with SmolLM2-135M-Instruct and the drafter that comes along; show what it gains."""
    if not drafter.is_dir():
        lack = "is not a folder" if drafter.exists() else "does not exist"
        raise _stop(f"The drafter folder {drafter} {lack}; train one or pass --drafter <folder>.")
    pair = _load("", str(drafter), dtype, device, trust_remote_code=False)
    _show(pair, prompt or DEMO_PROMPTS, max_new_tokens, temperature=0.0, seed=0)


@app.command()
def generate(
    drafter: Annotated[str, typer.Option(help="Folder or repository; unset: SmolLM2-135M-Instruct's own.")] = "",
    target: Annotated[str, typer.Option(help="Folder or repository of its target; unset: SmolLM2-135M-Instruct.")] = "",
    prompt: Prompts = None,
    max_new_tokens: NewTokens = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy; above it, sampling.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    dtype: Dtype = "auto",
    device: Device = "auto",
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run code the models bring.")] = False,
) -> None:
    """Answer prompts with any pair of target and drafter, compare with plain decoding, draw one block."""
    pair = _load_pair(target, drafter, dtype, device, trust_remote_code)
    _show(pair, prompt or DEMO_PROMPTS, max_new_tokens, temperature, seed)


def _prompt_files(prompts: list[str]) -> list[str]:
    """Answer at once for files that are not there; a name without such an ending may be a data set's."""
    with one_sentence():
        check_files(name for name in prompts if Path(name).is_file() or Path(name).suffix in (".jsonl", ".json"))
    return prompts


def _target_folder(target: str) -> str:
    with one_sentence():
        check_models(target, [])
    return target


def _known_dtype(dtype: str) -> str:
    with one_sentence():
        check_dtype(dtype)
    return dtype


@app.command()
def regenerate(
    prompts: Annotated[
        list[str],
        typer.Argument(
            help="JSONL files of rows with `messages`, or data sets.", callback=_prompt_files, is_eager=True
        ),
    ],
    output: Annotated[str, typer.Option(help="JSONL file to append answers to; what it holds is not generated again.")],
    target: Annotated[
        str,
        typer.Option(
            help="Folder or repository of the target; unset: --model, else SmolLM2-135M-Instruct.",
            callback=_target_folder,
        ),
    ] = "",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer at most.")] = 256,
    max_context: Annotated[int, typer.Option(min=0, help="Tokens of prompt and answer; 0: the target's limit.")] = 0,
    max_turns: Annotated[int, typer.Option(min=0, help="Answers of each conversation at most; 0: all.")] = 0,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy; above it, sampling.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest tokens of this probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Sample from so many likeliest tokens; 0: all.")] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    template_option: Annotated[
        list[str] | None, typer.Option(help="For the chat template, as NAME=JSON: enable_thinking=false.")
    ] = None,
    column: Annotated[str, typer.Option(help="Column of messages or of one prompt's text.")] = "",
    split: Annotated[str, typer.Option(help="Split of data sets.")] = "train",
    subset: Annotated[str, typer.Option(help="Subset of data sets.")] = "",
    limit: Annotated[int, typer.Option(min=0, help="Read only the first so many prompts; 0: all.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts decoded together.")] = 32,
    dtype: Annotated[str, typer.Option(help="auto, fp32, bf16 or fp16.", callback=_known_dtype)] = "bf16",
    endpoint: Annotated[str, typer.Option(help="OpenAI-compatible server to answer instead: http://…/v1.")] = "",
    model: Annotated[str, typer.Option(help="Name by which the endpoint serves the target.")] = "",
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at a time to the endpoint.")] = 32,
    retries: Annotated[int, typer.Option(min=0, help="Times that a failed request is sent again.")] = 8,
    strict: Annotated[bool, typer.Option("--strict", help="Stop at a row that cannot be used.")] = False,
) -> None:
    """Have the target answer every user message: the text a drafter learns from. Resumes where it was stopped."""
    options = dict(_template_option(text) for text in template_option or [])
    try:
        from .training.decode import Decoding
        from .training.endpoint import Endpoint
        from .training.prompts import Source
        from .training.regenerate import regenerate as run

        made = run(
            target or (model if endpoint else _embedded_target()),
            Source(prompts, column, split, subset, limit, max_turns),
            output,
            Decoding(max_new_tokens, max_context, temperature, top_p, top_k, seed),
            options,
            batch_size,
            dtype,
            Endpoint(endpoint, model, concurrency, retries) if endpoint else None,
            strict,
        )
    except (ValueError, OSError) as error:
        raise _stop(sentence(error)) from None
    except ModuleNotFoundError as error:
        raise _stop(f"Regeneration needs {error.name}: pip install 'lilicorr[train]'.") from None
    rate = f", {made.tokens / made.seconds:,.0f} tokens/s" if made.seconds else ""
    told = f"{made.turns} answers in {made.rows} rows added to {output} ({made.tokens:,} tokens{rate})"
    console.print(told, markup=False, soft_wrap=True)
    if made.cut:
        console.print(f"cut off before their end (finished is false): {made.cut} of {made.rows} rows", markup=False)
    for what, tally in {"left out": made.left_out, "written, but of no use to training": made.untrainable}.items():
        for line in tally.lines():
            console.print(f"{what}: {line}", markup=False, soft_wrap=True)


def _template_option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    try:
        if not name or not equals:
            raise ValueError
        return name, json.loads(value)
    except ValueError:
        raise _stop(
            f"--template-option is {text!r}, expected NAME=JSON, such as enable_thinking=false, depth=3 or "
            "style='\"short\"'."
        ) from None


@app.command()
def explain(
    prompt: Annotated[str, typer.Option(help="A user message.")] = DEMO_PROMPTS[1],
    drafter: Annotated[str, typer.Option(help="Folder or repository; unset: SmolLM2-135M-Instruct's own.")] = "",
    target: Annotated[str, typer.Option(help="Folder or repository of its target; unset: SmolLM2-135M-Instruct.")] = "",
    max_new_tokens: NewTokens = 64,
    nodes: Annotated[int | None, typer.Option(min=1, help="Nodes of a tree; unless given the drafter's own.")] = None,
    lookup: Annotated[
        bool, typer.Option("--lookup/--no-lookup", help="Whether the text's own continuation joins.")
    ] = True,
    blocks: Annotated[int, typer.Option(min=0, help="Blocks drawn in the terminal; the page has all.")] = 3,
    output: Annotated[Path | None, typer.Option(help="HTML file to write all blocks to, such as page.html.")] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run code the models bring.")] = False,
) -> None:
    """Take one greedy answer apart: candidates, trees, what the target said, and where acceptance is lost."""
    if output is not None and (output.is_dir() or not writable(output.parent)):
        raise _stop(f"--output {output} cannot be written; name a file in a folder that can.")
    pair = _load_pair(target, drafter, dtype, device, trust_remote_code)
    from .evaluation.compare import decoding_options, encode
    from .explain.page import page
    from .explain.terminal import print_call
    from .explain.trace import record

    model, config = pair.drafters["drafter"], pair.drafters["drafter"].config
    config.lookup, config.max_nodes = lookup, config.max_nodes if nodes is None else nodes
    with one_sentence():
        inputs = encode(pair.tokenizer, prompt, pair.target.device)
        with waiting("Answering"):
            call = record(pair.target, model, inputs, **decoding_options(max_new_tokens))
        print_call(console, call, pair.tokenizer, blocks)
        if output is None:
            console.print("--output page.html writes every block to a page.", style="dim", markup=False)
            return
        numbers = f"{str(pair.target.dtype).removeprefix('torch.')} on {pair.target.device}"
        about = {
            "target": target or "SmolLM2-135M-Instruct",
            "drafter": drafter or EMBEDDED_DRAFTER.name,
            "decoding": f"greedy, {numbers}, text's own continuation {'on' if lookup else 'off'}",
        }
        write_text(output, page(call, pair.tokenizer, about))
    console.print(f"page in {output}", markup=False, soft_wrap=True)


app.command()(train)
app.command()(evaluate)
app.command("replay")(replayed)
app.command()(publish)
app.command()(verify)


def _embedded_target() -> str:
    try:
        return str(smollm2())
    except TargetUnavailableError as error:
        raise _stop(str(error)) from None


def _load_pair(target: str, drafter: str, dtype: str, device: str, trust_remote_code: bool) -> "Pair":
    """`_load` of what was named; the embedded pair where neither was."""
    if target and not drafter:
        raise _stop(f"--target names {target}, but no --drafter belongs to it; give both, or neither for the one here.")
    return _load(target, drafter or str(EMBEDDED_DRAFTER), dtype, device, trust_remote_code)


def _load(target: str, drafter: str, dtype: str, device: str, trust_remote_code: bool) -> "Pair":
    """Target (empty: the embedded one) and drafter, looked at before anything large is imported or fetched."""
    with one_sentence():
        check_models(target, [drafter], dtype)
        source = target or _embedded_target()
        with loading("Loading target and drafter", source, drafter):
            from .evaluation.loading import load_pair

            return load_pair(
                source, {"drafter": drafter}, dtype=dtype, device=device, trust_remote_code=trust_remote_code
            )


def _show(pair: "Pair", prompts: list[str], max_new_tokens: int, temperature: float, seed: int) -> None:
    """Stream every assisted answer, then time both ways without a streamer, then print the table and one block."""
    from transformers import TextStreamer

    from .evaluation.blocks import draw_block
    from .evaluation.compare import Comparison, answer, compare, decoding_options, encode, warm_up
    from .evaluation.drawing import comparison_table, explain_differences, lattice_table, summary_line

    target, tokenizer, drafter = pair.target, pair.tokenizer, pair.drafters["drafter"]
    comparisons: list[Comparison] = []
    with one_sentence():
        options = decoding_options(max_new_tokens, temperature)
        with waiting("Warming up"):
            warm_up(target, [drafter], encode(tokenizer, prompts[0], target.device))
        for number, text in enumerate(prompts):
            console.rule(f"prompt {number + 1} of {len(prompts)}")
            console.print(text, style="bold", markup=False)
            streamer: Any = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
            answer(target, encode(tokenizer, text, target.device), drafter, seed=seed, streamer=streamer, **options)
            with waiting("Answering again, with the drafter and without, to time them"):
                comparisons.append(
                    compare(
                        target,
                        drafter,
                        tokenizer,
                        text,
                        max_new_tokens=max_new_tokens,
                        temperature=temperature,
                        assisted_first=number % 2 == 1,
                        seed=seed,
                    )
                )
        longest = max(comparisons, key=lambda comparison: len(comparison.plain.token_ids))
        inputs = encode(tokenizer, longest.prompt, target.device)
        block = draw_block(target, drafter, inputs, longest.plain.token_ids)
    console.rule()
    console.print(comparison_table(comparisons, target.dtype))
    console.print(summary_line(comparisons), markup=False, highlight=False)
    for line in explain_differences(comparisons, tokenizer, target.dtype):
        console.print(line, markup=False, highlight=False)
    if block is not None:
        console.print(lattice_table(block, tokenizer, shown=max(2, min(8, (console.width - 46) // 15))))
    console.print(f"{str(target.dtype).removeprefix('torch.')} on {target.device}", style="dim")


if __name__ == "__main__":
    app(prog_name="lilicorr")
