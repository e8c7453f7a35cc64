"""Configurations: what is refused, with which words; what comes back from the file that a run
writes."""

from __future__ import annotations

import tomllib
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from advbayes.runs.building import build_defense, prepare
from advbayes.runs.config import (
    DATA_SETS,
    ConfigError,
    RunConfig,
    accepted,
    make_config,
    read_toml,
    to_toml,
)
from tests.bad_configs import BAD, MALFORMED


def test_there_are_sixty_bad_configurations_and_all_are_different() -> None:
    assert len({text for text, _, _ in BAD}) == 60


@pytest.mark.parametrize(("text", "key", "wanted"), BAD, ids=[str(text)[:40] for text, _, _ in BAD])
def test_bad_values_are_refused_naming_key_and_range(
    tmp_path: Path, text: str, key: str, wanted: str
) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        make_config(read_toml(path))
    message = str(caught.value)
    assert message.startswith(f"{key}:"), message
    assert wanted in message
    assert "got" in message or "no such key" in message
    assert len(message) < 400


@pytest.mark.parametrize("text", MALFORMED, ids=range(len(MALFORMED)))
def test_files_that_are_not_toml_are_refused_naming_the_file(
    tmp_path: Path, text: str | bytes
) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=r"bad\.toml"):
        make_config(read_toml(path))


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        make_config({"lr": -1, "epochs": 0, "nomr": "l2"})
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == [
        "epochs",
        "lr",
        "nomr",
    ]


def test_missing_files_and_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"absent\.toml: wanted a configuration file, got nothing"
    ):
        read_toml(tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match="does not parse"):
        read_toml(tmp_path)


def test_every_key_is_described_and_says_what_it_accepts() -> None:
    for key, field in RunConfig.model_fields.items():
        assert field.description, key
        assert accepted(key), key


def test_the_data_sets_are_those_that_load() -> None:
    from advbayes.datasets import names

    assert set(DATA_SETS) == set(names())


numbers = st.floats(1e-6, 10, allow_nan=False)
values = st.fixed_dictionaries(
    {},
    optional={
        "data": st.sampled_from(["digits", "mnist"]),
        "root": st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=20),
        "hidden": st.lists(st.integers(1, 65536), max_size=8),
        "noise_scale": numbers | st.just("learned"),
        "epochs": numbers,
        "lr": numbers,
        "sigma": numbers,
        "seed": st.integers(0, 2**62),
        "compile": st.booleans(),
        "num_train": st.integers(1, 10**9) | st.none(),
        "defense": st.sampled_from(["none", "mix", "at"]),
    },
)


@settings(max_examples=60, deadline=None)
@given(values)
def test_a_written_configuration_is_read_back_the_same(given: dict[str, object]) -> None:
    config = make_config(given)
    text = to_toml(config)
    assert make_config(tomllib.loads(text)) == config
    for key in RunConfig.model_fields:  # every default is written down
        assert f"\n{key} = " in text or f"\n# {key} is not set" in text


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from([*RunConfig.model_fields, "x", ""]),
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.text()
        | st.lists(st.integers()),
        max_size=4,
    )
)
def test_whatever_comes_is_accepted_or_refused_by_the_one_error(given: dict[str, object]) -> None:
    with suppress(ConfigError):
        assert make_config(given) == make_config(make_config(given).model_dump())


def test_consistency_wants_samples_to_compare_and_classes_that_vote() -> None:
    with pytest.raises(ConfigError, match="num_channel: must be >= 2 for defense 'consistency'"):
        make_config({"defense": "consistency"})
    config = make_config({"data": "diabetes", "defense": "consistency", "num_channel": 2})
    with pytest.raises(ConfigError, match="defense: must be another than consistency"):
        build_defense(config, prepare(config))


@pytest.mark.parametrize("data", ["a.npz", "digits", "diabetes"])
@pytest.mark.parametrize(
    ("key", "value"), [("features", ("a",)), ("drop", ("a",)), ("target", "a")]
)
def test_columns_are_named_for_tables_in_files_alone(data: str, key: str, value: object) -> None:
    """Each key by itself: none is read and then ignored."""
    with pytest.raises(ConfigError, match=key):
        make_config({"data": data, key: value})
