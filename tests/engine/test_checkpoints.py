"""Files: whole or old whenever a write stops, equal bytes for equal weights, nothing executed when they are read."""

import os

import pytest
import torch

from vmamba_npu.engine import checkpoints
from vmamba_npu.engine.checkpoints import (
    STATE,
    CannotResume,
    check_same_run,
    find_state,
    load_state,
    load_weights,
    save_state,
    save_weights,
    write,
)


def test_interrupted_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "folder" / "file"
    write(path, lambda file: file.write(b"old"))

    def fail(file):
        file.write(b"ne")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(path, fail)
    assert path.read_bytes() == b"old"
    write(path, lambda file: file.write(b"new"))
    assert path.read_bytes() == b"new" and os.listdir(path.parent) == ["file"]


def test_file_is_on_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(checkpoints.os, "fsync", lambda handle: calls.append("sync"))
    replace = os.replace
    monkeypatch.setattr(checkpoints.os, "replace", lambda a, b: (calls.append("rename"), replace(a, b)))
    write(tmp_path / "file", lambda file: file.write(b"x"))
    assert calls == ["sync", "rename", "sync"]


def test_equal_weights_give_equal_bytes(tmp_path):
    weights = {"a": torch.arange(6.0).view(2, 3).t(), "b": torch.tensor(3)}
    save_weights(tmp_path / "one", weights)
    save_weights(tmp_path / "two", {name: value.clone() for name, value in weights.items()})
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    loaded = load_weights(tmp_path / "one")
    assert loaded.keys() == weights.keys() and all(torch.equal(loaded[name], weights[name]) for name in weights)


def test_state_is_read_without_executing_anything(tmp_path):
    save_state(tmp_path / "state", {"tensor": torch.ones(2), "position": {"epoch": 3, "history": [{"loss": 0.5}]}})
    state = load_state(tmp_path / "state")
    assert state["position"] == {"epoch": 3, "history": [{"loss": 0.5}]} and torch.equal(state["tensor"], torch.ones(2))
    save_state(tmp_path / "code", {"call": os.getcwd})
    (tmp_path / "words").write_bytes(b"words")
    torch.save({"format": 0}, tmp_path / "old")
    for name in ("code", "words", "old"):
        with pytest.raises(CannotResume, match=f"{name} is not a training state"):
            load_state(tmp_path / name)


def test_where_a_run_goes_on(tmp_path):
    assert find_state(None, tmp_path) is None and find_state("auto", tmp_path) is None
    with pytest.raises(CannotResume, match="no training state"):
        find_state(str(tmp_path / "absent"), tmp_path)
    save_state(tmp_path / STATE, {})
    assert find_state("auto", tmp_path) == find_state(str(tmp_path), tmp_path / "other") == tmp_path / STATE
    with pytest.raises(CannotResume, match=r"holds a run; trainer.resume=auto goes on with it"):
        find_state(None, tmp_path)


def test_values_of_the_run_must_be_those_that_it_began_with():
    config = {"seed": 0, "data": {"mean": [0.5], "cache_dir": "a"}, "trainer": {"epochs": 3, "resume": None}}
    config["logger"] = {"csv": {}}
    same = {"seed": 0, "data": {"mean": (0.5,), "cache_dir": "b"}, "trainer": {"epochs": 3, "resume": "auto"}}
    check_same_run(config, {**same, "logger": {}})
    with pytest.raises(CannotResume) as told:
        check_same_run(config, {**same, "trainer": {"epochs": 4, "clip": 1.0}, "logger": {}})
    assert "trainer.epochs: 3 in the run, 4 now" in str(told.value) and "seed" not in str(told.value)
    assert "trainer.clip: absent in the run, 1.0 now" in str(told.value)
