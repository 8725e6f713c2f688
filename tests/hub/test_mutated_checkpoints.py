"""2,000 mutated checkpoints: each loads what its files say, or gives one sentence.

None takes 5 seconds of the processor or a gigabyte of memory, none has a file outside its folder read or a connection
tried. The cases are drawn by hypothesis, the same ones in every run.
"""

import json
import math
import shutil
import signal
import socket
import struct
import sys
from contextlib import contextmanager

import pytest
import torch
from lilicorr import LiLiCorrModel
from lilicorr.modeling_lilicorr import checkpoint_files
from lilicorr.modeling_lilicorr.config_checks import KINDS
from lilicorr.modeling_lilicorr.layouts import our_name
from safetensors.torch import load_file, save_file
from transformers import AutoModel
from transformers.utils.logging import disable_progress_bar, enable_progress_bar

from .conftest import tiny_config

pytest.importorskip("hypothesis", reason="the test extra brings it")

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

resource = pytest.importorskip("resource", reason="memory and time cannot be bounded here")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is bounded by what Linux tells")
GIGABYTE, SECONDS = 1 << 30, 5
LAYOUTS = ("none", "lilicorr", "dspark", "longrope", "sharded", "dflash", "serving")
INDEX = "model.safetensors.index.json"


def drafter(**overrides):
    torch.manual_seed(0)
    config = tiny_config(num_hidden_layers=1, **overrides)
    if config.head_type != "lilicorr":
        config.head_config = {}
    if config.head_type == "dspark":
        config.head_config = {
            "markov_rank": 4,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        }
    model = LiLiCorrModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """The files of one checkpoint for each layout, by name: those that loading looks at."""
    root = tmp_path_factory.mktemp("originals")
    drafter(head_type="none").save_pretrained(root / "none")
    drafter().save_pretrained(root / "lilicorr")
    drafter(head_type="dspark").save_pretrained(root / "dspark")
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16}
    rope |= {"short_factor": [1.0] * 3, "long_factor": [2.0] * 3, "partial_rotary_factor": 0.75}
    drafter(head_type="none", rope_parameters=rope).save_pretrained(root / "longrope")
    drafter().save_pretrained(root / "sharded", max_shard_size="6KB")
    drafter().save_dflash(root / "dflash")
    drafter().save_serving(root / "serving")
    found = {}
    for layout in LAYOUTS:
        paths = (root / layout).iterdir()
        found[layout] = {path.name: path.read_bytes() for path in paths if path.suffix in (".json", ".safetensors")}
    assert len(found["sharded"]) > 3 and INDEX in found["sharded"]
    return found


NUMBERS = [-1, 0, 1, 2, 3, 5, 8, 97, 4096, 10**6, 10**9, 2**31, 2**63, 10**40, 0.5, 1.0, -0.5, 1e-30, 1e39, 1e308]
NUMBERS += [float("nan"), float("inf"), float("-inf")]
TEXTS = [
    "",
    "x",
    "8",
    "none",
    "lilicorr",
    "default",
    "yarn",
    "full_attention",
    "../x",
    "float32",
    "int8",
    "load",
    "A" * 9999,
]
LONG = "a list of 100,000 zeros"
JUNK = st.one_of(
    st.none(), st.booleans(), st.sampled_from(NUMBERS), st.sampled_from(TEXTS), st.integers(-10, 200),
    st.just([]), st.just({}), st.lists(st.sampled_from(NUMBERS), min_size=1, max_size=4), st.just([None]),
    st.just([[1]]), st.just({"a": {"b": []}}), st.lists(st.sampled_from(TEXTS), min_size=1, max_size=3),
    st.just(LONG),
)  # fmt: skip
ODD_KEYS = [
    "mlp_layer_types", "num_heads", "embed_dim", "text_config", "decoder", "generator", "auto_map", "architectures",
    "quantization_config", "transformers_weights", "configuration_files", "per_layer_config", "fusion_config",
    "attn_implementation", "_attn_implementation", "experts_implementation", "torch_dtype", "rope_scaling",
    "rope_theta", "name_or_path", "_name_or_path", "__class__", "__dict__", "validate", "to_dict", "num_slots",
    "num_labels", "id2label", "problem_type", "is_causal", "is_encoder_decoder", "output_hidden_states",
    "return_dict", "sub_configs", "temperature", "use_sliding_window", "lilicorr_future", "partial_rotary_factor",
    "original_max_position_embeddings", "projector_type",
]  # fmt: skip
FILES = [
    "../outside.safetensors",
    "outside/../../outside.safetensors",
    "x.bin",
    "",
    ".",
    "..",
    ".safetensors",
    "a\0b",
    "x",
]
FILES += [
    "model-00001-of-00009.safetensors",
    "config.json",
    "../outside.bin",
    "\\\\outside.safetensors",
    None,
    5,
    [],
    {},
]


@st.composite
def config_mutations(draw):
    """What to do to a configuration: for each of a few steps, where, and what."""
    step = st.tuples(st.sampled_from(["replace", "replace", "remove", "add"]), st.integers(0, 200), JUNK)
    return draw(st.lists(step, min_size=1, max_size=3))


def unpacked(junk):
    return [0] * 100_000 if junk == LONG else junk


def mutate_settings(content, mutations):
    places = [(content, key) for key in sorted(content)]
    for owner in list(content.values()):
        if isinstance(owner, dict):
            places += [(owner, key) for key in sorted(owner)] * 2
    for kind, place, junk in mutations:
        value = unpacked(junk)
        owner, key = places[place % len(places)]
        if kind == "remove":
            owner.pop(key, None)
        elif kind == "replace":
            owner[key] = value
        else:
            owner[ODD_KEYS[place % len(ODD_KEYS)]] = value
    return content


BYTES = st.tuples(
    st.sampled_from(["cut", "flip", "insert", "junk", "gone", "folder"]), st.floats(0, 1), st.binary(max_size=9)
)
JUNK_FILES = [
    b"",
    b"[]",
    b"null",
    b"5",
    b'"x"',
    b"{",
    b"\xff\xfe",
    b"[" * 100_000,
    b'{"a":' * 20_000,
    b"{}",
    b"9" * 5000,
]


def mutate_bytes(path, mutation):
    kind, where, extra = mutation
    content = path.read_bytes()
    at = int(where * len(content))
    if kind == "cut":
        path.write_bytes(content[:at])
    elif kind == "flip":
        at = min(at, len(content) - 1)
        path.write_bytes(content[:at] + bytes([content[at] ^ (1 + at % 255)]) + content[at + 1 :])
    elif kind == "insert":
        path.write_bytes(content[:at] + extra + content[at:])
    elif kind == "junk":
        path.write_bytes(JUNK_FILES[at % len(JUNK_FILES)])
    else:
        path.unlink()
        if kind == "folder":
            path.mkdir()


HEADER_JUNK = st.one_of(
    JUNK, st.sampled_from(["I32", "I64", "C64", "F8_E4M3", "BOOL", "U8", "F64", "BF16"]), st.just([10**6, 10**6])
)
HEADER = st.tuples(
    st.sampled_from(
        ["shape", "dtype", "data_offsets", "entry", "rename", "remove", "add", "metadata", "length", "value"]
    ),
    st.integers(0, 500),
    HEADER_JUNK,
)


def mutate_header(path, mutation):
    kind, place, value = mutation[0], mutation[1], unpacked(mutation[2])
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    names = sorted(name for name in header if name != "__metadata__")
    name = names[place % len(names)]
    if kind in ("shape", "dtype", "data_offsets"):
        header[name][kind] = value
    elif kind == "entry":
        header[name] = value
    elif kind == "rename":
        header[names[(place // 7) % len(names)] + "x" * (place % 2)] = header.pop(name)
    elif kind == "remove":
        del header[name]
    elif kind == "add":
        header["extra"] = {"dtype": "F32", "shape": [0], "data_offsets": [len(data), len(data)]}
    elif kind == "metadata":
        header["__metadata__"] = value
    elif kind == "value":
        begin = header[name]["data_offsets"][0]
        odd = struct.pack("<f", [math.nan, math.inf, -math.inf, 1e38, -0.0][place % 5])
        data = data[:begin] + odd + data[begin + 4 :]
    text = json.dumps(header).encode()
    size = value if kind == "length" and isinstance(value, int) and 0 <= value < 2**64 else len(text)
    path.write_bytes(struct.pack("<Q", size) + text + data)


@contextmanager
def limits(seconds):
    """A gigabyte of address space more than now, and so much time of the processor."""

    def too_long(*_):
        raise AssertionError(f"took longer than {seconds} s")

    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGPROF, too_long)
    resource.setrlimit(resource.RLIMIT_AS, (now + GIGABYTE, before[1]))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, before)
        signal.signal(signal.SIGPROF, handler)


class Reads:
    """Files that were opened, and addresses that were called, while a checkpoint loaded."""

    watched = None  # the one that is at work; a hook of the interpreter stays for good

    def __init__(self, root):
        self.root, self.paths, self.calls = str(root), [], []

    @classmethod
    def hook(cls, event, arguments):
        if cls.watched is not None and event == "open" and isinstance(arguments[0], str):
            cls.watched.paths.append(arguments[0])
        if cls.watched is not None and event in (
            "socket.connect",
            "socket.getaddrinfo",
            "subprocess.Popen",
            "os.system",
        ):
            cls.watched.calls.append((event, arguments))


@pytest.fixture(scope="module")
def load(tmp_path_factory, originals):
    """Writes a layout's files into a folder, lets them be mutated, loads them and judges the outcome."""
    root = tmp_path_factory.mktemp("mutated")
    folder = root / "folder"
    save_file(load_file_of(originals["none"], root / "whole.safetensors"), root / "outside.safetensors")
    (root / "outside.bin").write_bytes(b"not to be read")
    sys.addaudithook(Reads.hook)
    safe_open = checkpoint_files.safe_open
    outcomes = {"loaded": 0, "refused": 0}

    def watched_open(path, **options):
        if Reads.watched is not None:
            Reads.watched.paths.append(str(path))
        return safe_open(path, **options)

    def run(layout, mutate, automatic=False):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for name, content in originals[layout].items():
            (folder / name).write_bytes(content)
        mutate(folder)
        Reads.watched = reads = Reads(root)
        try:
            with limits(SECONDS):
                model = loaded(layout, folder, automatic)
        except (ValueError, OSError) as error:
            outcomes["refused"] += 1
            message = str(error)
            assert len(message) < 700 and "\n" not in message, message
            assert message.rstrip().endswith((".", ".)", "?")), message
            assert not isinstance(error, json.JSONDecodeError | UnicodeError), message
        else:
            outcomes["loaded"] += 1
            assert_equal_to_files(model, folder, layout)
            with limits(SECONDS):
                assert_drafts(model)
        finally:
            Reads.watched = None
        strayed = [path for path in reads.paths if path.startswith(str(root)) and not path.startswith(str(folder))]
        assert not strayed and not reads.calls

    with pytest.MonkeyPatch.context() as patch:
        disable_progress_bar()
        patch.setattr(checkpoint_files, "safe_open", watched_open)
        patch.setattr(socket.socket, "connect", None)
        run.outcomes = outcomes
        yield run
        enable_progress_bar()
    print(outcomes)


def load_file_of(files, scratch):
    scratch.write_bytes(files["model.safetensors"])
    return load_file(scratch)


def loaded(layout, folder, automatic):
    if layout == "serving":
        return LiLiCorrModel.from_dflash(folder)
    if layout == "dflash":
        return LiLiCorrModel.from_dflash(folder, "none")
    return AutoModel.from_pretrained(folder) if automatic else LiLiCorrModel.from_pretrained(folder)


def assert_equal_to_files(model, folder, layout):
    files = [folder / "model.safetensors"]
    if not files[0].is_file():
        files = sorted(folder.glob("model-*.safetensors"))
    stored = {
        our_name(name) if layout == "serving" else name: t for file in files for name, t in load_file(file).items()
    }
    state = model.state_dict()
    assert state.keys() == stored.keys()
    for name, tensor in stored.items():
        assert torch.equal(state[name], tensor.to(state[name].dtype)) and tensor.isfinite().all(), name
        assert layout in ("dflash", "serving") or state[name].dtype == tensor.dtype, name
    said = json.loads((folder / "config.json").read_text())
    for key in KINDS.keys() & said.keys() - {"architectures", "auto_map", "rope_parameters", "transformers_version"}:
        if layout not in ("dflash", "serving"):
            assert getattr(model.config, key) == said[key], key
    if layout not in ("dflash", "serving"):
        assert said["rope_parameters"].items() <= model.config.rope_parameters.items()


@torch.no_grad()
def assert_drafts(model):
    config, dtype = model.config, model.dtype
    states = torch.randn(1, 3, len(config.target_layer_ids) * config.hidden_size, dtype=dtype)
    table = torch.randn(config.vocab_size, config.hidden_size, dtype=dtype)
    for parameter in model.parameters():
        if parameter.dtype != dtype:
            return  # tensors of other dtypes than their neighbours load as they are; whether they multiply is theirs
    draft = model.draft(
        torch.zeros(1, dtype=torch.int64),
        states,
        torch.arange(3)[None],
        model.new_cache(),
        lambda ids: table[ids],
        lambda rows: rows @ table.T,
    )
    assert draft.tokens.shape == (1, config.block_size - 1)


def cases(count):
    return settings(
        max_examples=count, derandomize=True, deadline=None, database=None,
        suppress_health_check=list(HealthCheck), print_blob=False, phases=(Phase.generate, Phase.shrink),
    )  # fmt: skip


def configure(path, mutations):
    content = mutate_settings(json.loads(path.read_text()), mutations)
    path.write_text(json.dumps(content))


@cases(800)
@given(st.sampled_from(LAYOUTS[:5]), config_mutations())
def test_settings_of_our_layout(load, layout, mutations):
    load(layout, lambda folder: configure(folder / "config.json", mutations))


@cases(200)
@given(st.sampled_from(LAYOUTS[:4]), config_mutations())
def test_settings_of_our_layout_through_the_auto_class(load, layout, mutations):
    def mutate(folder):
        path = folder / "config.json"
        kept = {
            key: value for key, value in json.loads(path.read_text()).items() if key not in ("model_type", "auto_map")
        }
        content = {key: value for key, value in mutate_settings(dict(kept), mutations).items() if key in kept}
        path.write_text(json.dumps({**content, "model_type": "lilicorr"}))

    load(layout, mutate, automatic=True)


@cases(400)
@given(st.sampled_from(["dflash", "serving"]), config_mutations())
def test_settings_of_other_layouts(load, layout, mutations):
    load(layout, lambda folder: configure(folder / "config.json", mutations))


@cases(300)
@given(st.sampled_from(["none", "lilicorr", "serving"]), HEADER)
def test_headers_and_values(load, layout, mutation):
    load(layout, lambda folder: mutate_header(folder / "model.safetensors", mutation))


@cases(150)
@given(st.sampled_from(LAYOUTS), st.sampled_from(["config.json", "model.safetensors", INDEX]), BYTES)
def test_bytes_of_any_file(load, layout, name, mutation):
    def mutate(folder):
        paths = [path for path in (folder / name, *sorted(folder.glob("*.safetensors"))) if path.is_file()]
        mutate_bytes(paths[0], mutation)

    load(layout, mutate)


@cases(150)
@given(st.sampled_from(FILES), st.integers(0, 100), st.booleans(), config_mutations())
def test_index(load, name, place, names_all, mutations):
    def mutate(folder):
        index = json.loads((folder / INDEX).read_text())
        names = sorted(index["weight_map"])
        for tensor in names if names_all else [names[place % len(names)]]:
            index["weight_map"][tensor] = name
        if place % 3 == 0:
            index = mutate_settings(index, mutations)
        (folder / INDEX).write_text(json.dumps(index))

    load("sharded", mutate)
