"""The drafter that users load: DFlash backbone and head in one `PreTrainedModel`."""

import os
import tempfile
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from ..candidate_generator.decode import decode
from ..candidate_generator.figures import GenerationFigures, LatestFigures
from ..candidate_generator.hook import install
from ..candidate_generator.lilicorr_generator import LiLiCorrCandidateGenerator
from ..candidate_generator.pace import KnownTimes
from ..candidate_generator.requests import check_cache, check_processors, check_target
from ..kernels.int8_logits import KnownLogits
from .batch_draft_cache import BatchDraftCache
from .checkpoint_files import (
    check_headers,
    common_dtype,
    find_weights,
    headers_of,
    local_folder,
    read_headers,
    read_tensors,
    restore_dtypes,
)
from .configuration_lilicorr import LiLiCorrConfig
from .dflash import DFlashModel, DraftCache
from .draft_graphs import DraftGraphs, KnownGraphs
from .head_alone import FROZEN, check_backbone, is_head_alone, read_head, without_heads
from .heads import DraftHead, build_head
from .lattice import Block, Draft
from .layouts import (
    config_from_dflash,
    dflash_settings,
    has_head,
    read_checkpoint,
    served_tensors,
    serving_settings,
    write_checkpoint,
)
from .repository import COMMIT_ARGUMENTS, save_repository, upload

DOWNLOAD = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")


class LiLiCorrModel(DFlashModel):
    """A drafter for `target.generate(..., assistant_model=drafter)`.

    It holds no embedding and no LM head: both are the target's, handed in at every call. It keeps no state between
    calls either, apart from the figures of `last_generation`, the durations in `step_times`, eight-bit copies of LM
    heads in `fast_logits` and captured drafts in `graphs`.
    """

    # Transformers' report of missing tensors: a checkpoint's are compared before it is read, a fresh head has none.
    _keys_to_ignore_on_load_missing = [""]  # noqa: RUF012 (as Transformers declares it)

    def __init__(self, config: LiLiCorrConfig) -> None:
        config.validate()
        super().__init__(config)
        self._figures = LatestFigures()
        self.step_times = KnownTimes()
        self.fast_logits = KnownLogits()
        self.graphs = KnownGraphs()
        self.add_module(config.head_type, build_head(config))
        self.post_init()
        install()

    @property
    def last_generation(self) -> GenerationFigures | None:
        """Figures of the latest `generate` call that it served in this thread."""
        return self._figures.get()

    @last_generation.setter
    def last_generation(self, figures: GenerationFigures | None) -> None:
        self._figures.put(figures)

    @property
    def head(self) -> DraftHead:
        """The head, whose parameters live under the prefix `<head_type>.`."""
        return cast(DraftHead, self.get_submodule(self.config.head_type))

    def new_cache(self) -> DraftCache:
        """An empty context cache for one sequence."""
        return DraftCache(self.config.num_hidden_layers)

    def new_batch_cache(self) -> BatchDraftCache:
        """A context cache for any number of sequences, of which there are none yet."""
        return BatchDraftCache(self.config.num_hidden_layers, self.device)

    def block_ids(self, anchor_ids: Tensor, num_slots: int | None = None) -> Tensor:
        """`[N]` anchor tokens to block inputs `[N, 1 + num_slots]`: the anchor, then masks, `B - 1` if not told."""
        slots = self.config.num_slots if num_slots is None else num_slots
        masks = anchor_ids.new_full((anchor_ids.shape[0], slots), self.config.mask_token_id)
        return torch.cat([anchor_ids[:, None], masks], dim=1)

    def draft(
        self,
        anchor_ids: Tensor,
        context_hidden_states: Tensor,
        context_positions: Tensor,
        cache: DraftCache,
        embed: Callable[[Tensor], Tensor],
        lm_head: Callable[[Tensor], Tensor],
        return_lattice: bool = False,
        num_slots: int | None = None,
        warp: Callable[[Tensor, Tensor], Tensor] | None = None,
        graphs: DraftGraphs | None = None,
    ) -> Draft:
        """Draft one block (paper §3.5): backbone, LM head, lattice, walk.

        Args:
            anchor_ids: the last committed token, `[N]` (int64), at the position after the last context row; `N` is 1
                but for a cache from `new_batch_cache`.
            context_hidden_states: target hidden states of the rows that `cache` lacks, `[N, C, layers * d]`, `C >= 1`.
            context_positions: their absolute positions, `[N, C]` (int64).
            cache: from `new_cache` or `new_batch_cache`; holds the older rows and takes in these.
            embed: the target's input embedding, ids `[...]` to `[..., d]`.
            lm_head: the target's output projection, `[..., d]` to `[..., vocab]` (rows beyond `vocab_size` are cut).
            return_lattice: also return candidates, log-probabilities, scores and picks.
            num_slots: draft only the first so many of the `B - 1` slots. The block ends behind them: what a slot hears
                from masks behind it is of no use to it (`lilicorr replay --num-assistant-tokens` counts).
            warp: for a head that can draw its tokens, see `Block`; others take no notice.
            graphs: replay the draft where that is possible and no lattice is asked for; `graphs.of` gives them.

        Returns:
            `Draft` with tokens `[N, num_slots]`.
        """
        given = (anchor_ids, context_hidden_states, context_positions, cache, embed, lm_head)
        if graphs is not None and not return_lattice:
            return graphs.draft(self, *given, num_slots, warp)
        return self.head.draft(self.block(*given, num_slots, warp), return_lattice=return_lattice)

    def block(
        self,
        anchor_ids: Tensor,
        context_hidden_states: Tensor,
        context_positions: Tensor,
        cache: DraftCache,
        embed: Callable[[Tensor], Tensor],
        lm_head: Callable[[Tensor], Tensor],
        num_slots: int | None = None,
        warp: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> Block:
        """What the head is shown for one block, from backbone and LM head; arguments as of `draft`."""
        context = self.project_context(context_hidden_states)
        ids = self.block_ids(anchor_ids, num_slots)
        size = ids.shape[1]
        block_positions = cache.newest(context_positions)[:, None] + 1 + torch.arange(size, device=self.device)
        noise = embed(ids).to(device=self.device, dtype=self.dtype)
        states = self.decode_block(noise, context, block_positions, context_positions, cache.mask(size), cache)
        hidden = states[:, 1:]
        logits = lm_head(hidden)[..., : self.config.vocab_size]
        return Block(hidden, logits, anchor_ids, cache.newest(context), None, embed, warp, states[:, 0])

    def check_generation(self, target: PreTrainedModel, generation_config: GenerationConfig, options: Any) -> None:
        """Asked by `generate` in place of Transformers' own refusals of assisted generation.

        Args:
            options: what `generate` was given for its mode, such as `assistant_tokenizer`.

        Raises:
            ValueError: this drafter cannot serve the call.
        """
        check_target(self, target)
        if options.get("assistant_tokenizer") is not None:
            raise ValueError("A drafter reads its target's own tokens; leave out assistant_tokenizer.")

    def decode(self, target: PreTrainedModel, input_ids: Tensor, **call: Any) -> Any:
        """What `target.generate(..., assistant_model=self)` asks for: the whole call, by the loop of this package.

        Args:
            target: the decoder-only model that generates.
            input_ids: prompts, `[batch, L]` (int64), padded on the left.
            **call: what `generate` prepared, see `decode.decode`.

        Returns:
            What `generate` returns, or `NotImplemented` where Transformers' own loop is to decode: the configuration
            asks for it (`decoding`), several processes step together, or drafted tokens are to be drawn.

        Raises:
            ValueError: the call asks for what cannot be had.
        """
        drawn = self.config.proposal == "sampled" and call["generation_config"].do_sample
        if self.config.decoding == "stock" or drawn or call.pop("synced_gpus", False):
            check_cache(call, call["generation_config"], input_ids)  # in place of Transformers' words about it
            return NotImplemented
        for name in ("inputs_tensor", "assistant_model", "assistant_tokenizer", "tokenizer"):
            call.pop(name, None)
        return decode(self, target, input_ids, **call)

    @classmethod
    def can_generate(cls) -> bool:
        """No: `generate` is there only to say so."""
        return False

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """A drafter generates nothing by itself.

        Raises:
            TypeError: always, with what to write instead.
        """
        raise TypeError("A drafter generates nothing by itself; write target.generate(..., assistant_model=drafter).")

    def get_candidate_generator(
        self,
        target: PreTrainedModel,
        *,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        input_ids: Tensor,
        **kwargs: Any,
    ) -> LiLiCorrCandidateGenerator:
        """What `target.generate(..., assistant_model=self)` asks for: a generator that serves this one call.

        Args:
            target: the decoder-only model that generates.
            generation_config, model_kwargs: of the call, as `generate` prepared them.
            input_ids: the prompt, `[1, L]` (int64).
            **kwargs: `logits_processor`, looked at for those that cannot work; a drafter whose `proposal` is
                "sampled" draws through it.

        Raises:
            ValueError: for a batch, an encoder-decoder target, a target that this drafter was not made for, or a logits
                processor with a state of its own.
        """
        check_processors(kwargs.get("logits_processor") or ())
        processors = kwargs.get("logits_processor")
        return LiLiCorrCandidateGenerator(self, target, generation_config, model_kwargs, input_ids, processors)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *model_args: Any, **kwargs: Any) -> Any:
        """As in Transformers, but safetensors only, and all is checked before anything is built.

        Settings come first, then the tensors' names and shapes, then their values. Without `dtype` each tensor keeps
        that of its file, which need not be the same for all. A folder is read without asking the Hub.

        Raises:
            OSError: a file is missing.
            ValueError: a file is torn or names others outside, a setting cannot work or is missing, tensors do not fit
                `config.json` or are not finite, or the format is newer than this code.
        """
        if kwargs.pop("use_safetensors", True) is False:
            raise ValueError(
                "Drafters are stored as safetensors only, since pickle can run code; drop use_safetensors."
            )
        for needless in ("ignore_mismatched_sizes", "weights_only", "proxies", "adapter_kwargs", "adapter_name"):
            kwargs.pop(needless, None)
        source = pretrained_model_name_or_path
        config: Any = kwargs.pop("config", None)
        dtype, older = kwargs.pop("dtype", None), kwargs.pop("torch_dtype", None)
        dtype = older if dtype is None else dtype
        download = {key: kwargs.pop(key) for key in DOWNLOAD if kwargs.get(key) is not None}
        variant = kwargs.pop("variant", None)
        if source is not None and local_folder(source) is not None:
            download["local_files_only"] = True
        if not isinstance(config, PreTrainedConfig):
            known = vars(LiLiCorrConfig())
            overrides = {key: kwargs.pop(key) for key in list(kwargs) if key in known}
            config = cls.config_class.from_pretrained(config or source, **download, **overrides)
        if config.model_type != LiLiCorrConfig.model_type:  # remote code may be there twice: classes tell nothing
            raise ValueError(f"{source} holds a model of type {config.model_type!r}, not a LiLiCorr drafter.")
        config.validate()
        if is_head_alone(config):
            raise ValueError(
                f"{source} holds a head alone; load it with LiLiCorrModel.from_dflash(<its backbone>, head={source!r})."
            )
        tensors = kwargs.pop("state_dict", None)
        if tensors is None:
            headers = read_headers(find_weights(source, variant, **download))
            check_headers(headers, cls, config, source)
            tensors = read_tensors(headers)
        else:
            headers = headers_of(tensors)
            check_headers(headers, cls, config, "state_dict")
        as_stored = dtype in (None, "auto")
        loaded: Any = super().from_pretrained(
            None,
            *model_args,
            config=config,
            state_dict=tensors,
            dtype=common_dtype(tensors) if as_stored else dtype,
            **kwargs,
        )
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        if as_stored and getattr(model, "hf_quantizer", None) is None:
            restore_dtypes(model, tensors)
        model.config.name_or_path = str(source or "")
        return loaded

    @classmethod
    def from_dflash(
        cls,
        source: str | os.PathLike,
        head_type: str = "lilicorr",
        *,
        revision: str | None = None,
        head: str | os.PathLike | None = None,
        head_revision: str | None = None,
        **config_overrides: Any,
    ) -> "LiLiCorrModel":
        """Start from a DFlash checkpoint in z-lab's layout, or load one in the layout of LiLiCorr's authors.

        With `head`, put a head on it that was trained on it while it was frozen and published alone.

        Args:
            source: local folder, or `owner/name` on the Hub (safetensors and JSON only are fetched).
            head_type: the head to put on the backbone; its weights are fresh unless the checkpoint brings them.
            revision: branch, tag or commit on the Hub.
            head, head_revision: folder or repository of a head alone, which brings its own type and settings.
            **config_overrides: arguments of `LiLiCorrConfig`, such as `head_config`; none with `head`.

        Returns:
            The model in the checkpoint's dtype, in evaluation mode.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: a file is torn, a key or tensor is missing or does not fit, a setting is not supported, or the
                head was trained on another backbone.
        """
        settings, headers = read_checkpoint(source, revision)
        if head is not None:
            if config_overrides:
                raise ValueError(
                    f"{head} brings its own settings; leave out {', '.join(config_overrides)}, or change the drafter's "
                    "configuration once it is loaded."
                )
            config, own = read_head(head, head_revision)
            backbone = without_heads(headers)
            check_headers(backbone | own, cls, config, f"{source} with {head}")
            tensors = read_tensors(backbone)
            check_backbone(config, settings, tensors, source)
            tensors |= read_tensors(own)
            delattr(config, FROZEN)  # together they are a whole drafter
            return super().from_pretrained(None, config=config, state_dict=tensors, dtype=common_dtype(tensors))
        config = config_from_dflash(settings, head_type, **config_overrides)
        fresh = None if has_head(settings) and head_type == "lilicorr" else f"{head_type}."
        if has_head(settings) and fresh is not None:
            headers = {name: header for name, header in headers.items() if not name.startswith("lilicorr.")}
        check_headers(headers, cls, config, source, fresh)
        tensors = read_tensors(headers)
        return super().from_pretrained(None, config=config, state_dict=tensors, dtype=common_dtype(tensors))

    def save_dflash(self, folder: str | os.PathLike) -> None:
        """Write the backbone alone, without the head, in z-lab's layout for DFlash runtimes.

        Raises:
            ValueError: DFlash runtimes do not compute its positions.
            OSError: `folder` cannot be written.
        """
        prefix = f"{self.config.head_type}."
        tensors = {name: tensor for name, tensor in self.state_dict().items() if not name.startswith(prefix)}
        write_checkpoint(folder, dflash_settings(self.config, self.dtype), tensors)

    def save_serving(self, folder: str | os.PathLike) -> None:
        """Write backbone and head in the layout that SGLang and vLLM serve.

        Raises:
            ValueError: they do not serve this head, or not with this many candidates.
            OSError: `folder` cannot be written.
        """
        write_checkpoint(folder, serving_settings(self.config, self.dtype), served_tensors(self.state_dict()))

    def save_pretrained(  # type: ignore[override]  # the options not named here pass through
        self,
        save_directory: str | os.PathLike,
        is_main_process: bool = True,
        state_dict: dict[str, Tensor] | None = None,
        push_to_hub: bool = False,
        **kwargs: Any,
    ) -> None:
        """Write a complete repository: weights, configuration, the code that loads them, a card if there is none.

        Args:
            save_directory: folder, created if need be; each file is complete before it takes its place.
            is_main_process, state_dict: as in Transformers.
            push_to_hub: also upload it, to `repo_id` (default: the folder's name).
            **kwargs: other options of `PreTrainedModel.save_pretrained` and `push_to_hub`.

        Raises:
            OSError: the folder cannot be written.
            ValueError: the configuration cannot work.
        """
        if not is_main_process:
            return
        commit = {key: kwargs.pop(key) for key in COMMIT_ARGUMENTS if key in kwargs}
        repo_id = kwargs.pop("repo_id", None)
        tags = [*(self.model_tags or []), *kwargs.pop("tags", [])]
        save_repository(self.config, save_directory, super().save_pretrained, repo_id, tags, state_dict, **kwargs)
        if push_to_hub:
            upload(save_directory, repo_id or os.path.basename(os.path.abspath(save_directory)), **commit)

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> Any:  # type: ignore[override]  # same options, passed through
        """Upload a complete repository as one commit; a model card that is already there stays.

        Args:
            repo_id: `owner/name` on the Hub, created if need be.
            **kwargs: `tags`, `max_shard_size`, `token`, `private`, `revision`, `commit_message`, `commit_description`,
                `create_pr`, as in Transformers.

        Returns:
            The Hub's `CommitInfo`.
        """
        commit = {key: kwargs.pop(key) for key in COMMIT_ARGUMENTS if key in kwargs}
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder, repo_id=repo_id, **kwargs)
            return upload(folder, repo_id, **commit)
