"""Files of tensors and facts: what was changed, what is of another schema, and what does not fit together."""

import json
import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save, save_file

import bayeskit as bk
from bayeskit import exact
from bayeskit._core.folders import RunFolder, Schema, read_facts, write_facts
from bayeskit._core.storage import loaded_tensors, save_tensors
from bayeskit.errors import CheckpointError, OutputError

SCHEMA = Schema("a test", 2)
TENSORS = {
    "empty": torch.zeros(0, 3),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "half": torch.tensor([1.0, -0.0, float("nan")], dtype=torch.bfloat16),
    "truth": torch.tensor([[True], [False]]),
    "view": torch.arange(6.0).reshape(2, 3).T,
    "one number with a stride": torch.arange(10.0)[3:8:5],
    "expanded": torch.tensor([1.5]).expand(3),
}
FACTS = {"number": 0.1, "nested": {"list": [None, 1, "\ud800ü"]}}


@pytest.fixture
def path(tmp_path):
    save_tensors(tmp_path / "file", TENSORS, FACTS, SCHEMA)
    return tmp_path / "file"


def read(path, schema=SCHEMA):
    with loaded_tensors(path, schema) as (tensors, facts):
        return tensors, facts


def test_what_is_read_is_what_was_written(path):
    tensors, facts = read(path)
    assert facts == FACTS and tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert tensors[name].dtype == tensor.dtype
        torch.testing.assert_close(tensors[name], tensor, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_files_are_those_of_the_library_of_the_format(tmp_path, dtype):
    tensors = {"ä/b": torch.arange(6).reshape(2, 3).to(dtype), "a": torch.zeros(0, 2, dtype=dtype)}
    tensors |= {"view": tensors["ä/b"][:, 1], "scalar": torch.tensor(1, dtype=dtype)}
    save_tensors(tmp_path / "ours", tensors, {}, SCHEMA)
    with safe_open(tmp_path / "ours", framework="pt") as file:
        metadata = file.metadata()
    theirs = save({name: x.contiguous() for name, x in tensors.items()}, metadata=metadata)
    assert (tmp_path / "ours").read_bytes() == theirs
    for name, x in load_file(tmp_path / "ours").items():
        assert torch.equal(x, tensors[name])


def test_a_type_that_the_format_has_not_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="'z' is of type torch.complex128"):
        save_tensors(tmp_path / "x", {"z": torch.zeros(2, dtype=torch.complex128)}, {}, SCHEMA)
    with pytest.raises(CheckpointError, match="characters that a file cannot hold"):
        save_tensors(tmp_path / "x", {"\ud800": torch.zeros(2)}, {}, SCHEMA)
    assert not list(tmp_path.iterdir())


def test_every_changed_byte_is_found(path):
    whole = path.read_bytes()
    start = len(whole) - 8 - sum(t.numel() * t.element_size() for t in TENSORS.values())
    for at in [*range(0, start, 11), *range(start, len(whole))]:
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        try:
            tensors, facts = read(path)
        except CheckpointError as error:
            assert str(path) in str(error)
        else:  # a blank of the header
            assert facts == FACTS and torch.equal(tensors["view"], TENSORS["view"])
            assert at < start


def test_a_changed_number_is_called_damage(path):
    whole = path.read_bytes()
    place = whole.index(TENSORS["scalar"].numpy().tobytes())
    path.write_bytes(whole[:place] + b"\1" + whole[place + 1 :])
    with pytest.raises(CheckpointError, match=r"file is damaged: its contents do not match their checksum; .* delete"):
        read(path)


def test_another_schema_or_version_is_named(path):
    with pytest.raises(CheckpointError, match="file holds a test, not draws"):
        read(path, Schema("draws", 2))
    with pytest.raises(CheckpointError, match="a test of version 2, this bayeskit reads version 3; use the bayeskit"):
        read(path, Schema("a test", 3))


@pytest.mark.parametrize("facts", ["{}", "[1]", "3", "[" * 100_000, '{"schema": "a test", "version": 2}'])
def test_facts_without_a_checksum_are_refused(path, facts):
    save_file({"x": torch.ones(2)}, path, metadata={"bayeskit": facts})
    with pytest.raises(CheckpointError, match=r"file (has no checksum|is truncated or not)"):
        read(path)


def test_what_a_block_raises_names_the_file(path):
    for broken in (lambda tensors, facts: tensors["none"], lambda tensors, facts: facts["number"] + "1"):
        with pytest.raises(CheckpointError, match=r"file: its contents do not fit together \((Key|Type)Error"):
            with loaded_tensors(path, SCHEMA) as (tensors, facts):
                broken(tensors, facts)


def test_files_of_facts_are_held_to_the_same(tmp_path):
    path = tmp_path / "facts.json"
    write_facts(path, FACTS, SCHEMA)
    assert read_facts(path, SCHEMA) == FACTS
    text = path.read_text()
    path.write_text(json.dumps(json.loads(text)))  # white space is no damage
    assert read_facts(path, SCHEMA) == FACTS
    for changed, said in (
        (text.replace("0.1", "0.2"), "damaged"),
        (text[:-9], "truncated"),
        ("[" * 10**5, "truncated"),
    ):
        path.write_text(changed)
        with pytest.raises(CheckpointError, match=rf"facts.json is {said}"):
            read_facts(path, SCHEMA)


def test_a_damaged_record_of_a_run_is_refused_and_replaced_on_demand(tmp_path):
    folder = RunFolder(tmp_path / "run", {"seed": 1})
    folder.finish("done", 3)
    assert RunFolder(tmp_path / "run", {"seed": 1}).finished == ("done", 3)
    record = tmp_path / "run" / "run.json"
    record.write_text(record.read_text().replace('"status": 3', '"status": 0'))
    with pytest.raises(OutputError, match=r"run.json is damaged.*--force"):
        RunFolder(tmp_path / "run", {"seed": 1})
    assert RunFolder(tmp_path / "run", {"seed": 1}, force=True).finished is None


@pytest.fixture(scope="module")
def target():
    target = exact.get("beta_binomial").target()
    target.compile = False
    return target


RUN = Schema("a checkpoint of a run in steps", 3)


@pytest.mark.calibration
@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("generator", lambda x: x[:-1]),
        ("generator", lambda x: torch.zeros_like(x)),
        ("generator", lambda x: x.double()),
        ("record.log_prior", lambda x: x.reshape(-1)),
        ("record.log_prior", lambda x: x.float()),
        ("state.kernel.position", lambda x: x[:1]),
        ("iteration", "many"),
        ("iteration", None),
        ("seconds", []),
        ("settings", 3),
    ],
)
def test_a_checkpoint_with_a_right_checksum_may_not_fit(tmp_path, target, name, made):
    path = tmp_path / "state"
    bk.sample(target, 2, 20, 5, checkpoint=path, progress=False)
    with loaded_tensors(path, RUN) as (tensors, facts):
        pass
    if name in facts:
        facts[name] = made
    else:
        (found,) = [key for key in tensors if key.endswith(name.partition(".")[2] or name)][:1]
        tensors[found] = made(tensors[found]).clone()
    save_tensors(path, tensors, facts, RUN)
    with pytest.raises(CheckpointError, match="state: its contents do not fit together"):
        bk.sample(target, 2, 20, 5, checkpoint=path, progress=False)


@pytest.mark.parametrize("lost", ["beta", "num_gradients", "settings"])
def test_draws_without_a_part_are_refused(tmp_path, lost):
    path = tmp_path / "draws"
    x = torch.zeros(2, 3)
    bk.Draws(torch.zeros(2, 3, 1), x, x, torch.ones(2)).save(path)
    with loaded_tensors(path, Schema("draws", 2)) as (tensors, facts):
        pass
    (tensors if lost in tensors else facts).pop(lost)
    save_tensors(path, tensors, facts, Schema("draws", 2))
    with pytest.raises(CheckpointError, match=rf"draws: its contents do not fit together \(KeyError: '{lost}'"):
        bk.Draws.load(path)


def test_an_earlier_file_is_refused_with_the_reason(tmp_path):
    path = tmp_path / "draws"
    save_file({"beta": torch.ones(1)}, path, metadata={"bayeskit": json.dumps({"kind": "draws"})})
    with pytest.raises(CheckpointError, match="has no checksum: .* before 0.1"):
        bk.Draws.load(path)
    assert load_file(path)["beta"] == 1 and os.listdir(tmp_path) == ["draws"]
