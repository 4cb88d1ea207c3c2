"""Settings: where a value comes from, what is refused and how the refusal reads."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated, ClassVar, Self

import pytest
from pydantic import ByteSize, Field, SecretStr, model_validator

from protocol.config import Positional, Settings, SettingsError, Shown, markdown_table, options_of


class Dtype(enum.StrEnum):
    AUTO = "auto"
    FLOAT32 = "float32"


class Example(Settings):
    """An example program."""

    model: Annotated[str, Positional()] = Field(description="Folder of the model.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on.")
    memory: ByteSize | None = Field(None, description="Bytes, such as 2GiB.")
    engine: tuple[str, ...] = Field((), description="Address of an engine.")
    api_key: SecretStr | None = Field(None, description="Key that clients must send.")
    prefix_caching: bool = Field(True, description="Keep blocks for later requests.")
    dtype: Dtype = Field(Dtype.AUTO, description="Type of weights.")
    timeout: float = Field(1.5, gt=0, description="Seconds.")


def load(*argv: str, **environ: str) -> Example:
    return Example.load(argv, environ, prog="example")


def refusal(*argv: str, **environ: str) -> str:
    with pytest.raises(SettingsError) as caught:
        load(*argv, **environ)
    return str(caught.value)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "example.toml"


def test_every_kind_of_value_comes_from_flags() -> None:
    config = load(
        "m", "--port=1", "--memory", "2GiB", "--engine=a", "--engine", "b,c", "--no-prefix-caching", "--dtype=float32"
    )
    assert (config.model, config.port, config.memory) == ("m", 1, 2 * 2**30)
    assert config.engine == ("a", "b,c")
    assert config.prefix_caching is False
    assert config.dtype is Dtype.FLOAT32


def test_every_kind_of_value_comes_from_the_environment() -> None:
    config = load(
        SLUICEGATE_MODEL="m",
        SLUICEGATE_PORT="1",
        SLUICEGATE_ENGINE="a, b",
        SLUICEGATE_PREFIX_CACHING="false",
        SLUICEGATE_TIMEOUT="0.5",
    )
    assert (config.model, config.port, config.engine) == ("m", 1, ("a", "b"))
    assert (config.prefix_caching, config.timeout) == (False, 0.5)


def test_every_kind_of_value_comes_from_a_file(file: Path) -> None:
    file.write_text('model = "m"\nport = 1\nengine = ["a", "b"]\nprefix_caching = false\nmemory = "1MiB"\n')
    config = load(f"--config={file}")
    assert (config.model, config.port, config.engine) == ("m", 1, ("a", "b"))
    assert (config.prefix_caching, config.memory) == (False, 2**20)


def test_a_flag_wins_over_the_environment_that_over_the_file_that_over_the_default(file: Path) -> None:
    file.write_text('port = 1\nmodel = "file"\ntimeout = 9.0\n')
    found = load("--port=3", SLUICEGATE_PORT="2", SLUICEGATE_MODEL="environment", SLUICEGATE_CONFIG=str(file))
    assert (found.port, found.model, found.timeout, found.dtype) == (3, "environment", 9.0, Dtype.AUTO)


def test_a_repeated_flag_replaces_what_lower_sources_gave() -> None:
    assert load("m", "--engine=x", SLUICEGATE_ENGINE="a,b").engine == ("x",)


def test_an_empty_variable_is_an_unset_one() -> None:
    assert load("m", SLUICEGATE_PORT="").port == 8000


def test_a_positional_may_be_given_with_its_flag_but_not_twice() -> None:
    assert load("--model", "m").model == "m"
    assert refusal("m", "--model=n") == "--model is given twice: 'n' and 'm'."


def test_unknown_flags_name_the_nearest() -> None:
    assert refusal("m", "--prot=1") == "unknown option --prot; did you mean --port?"
    assert refusal("m", "--zzzzzzz") == "unknown option --zzzzzzz."
    assert refusal("m", "--por=1") == "unknown option --por; did you mean --port?"  # no abbreviations
    assert refusal("m", "n") == "unexpected argument 'n'."


def test_unknown_keys_of_the_file_name_the_nearest(file: Path) -> None:
    file.write_text("prefix-caching = false\n")
    assert refusal("m", f"--config={file}") == f"unknown key prefix-caching in {file}; did you mean prefix_caching?"
    file.write_text("parent_pipe = 3\n")
    assert refusal("m", f"--config={file}") == f"unknown key parent_pipe in {file}."


def test_unknown_variables_that_are_nearly_ours_are_refused_and_others_left_alone() -> None:
    assert refusal("m", SLUICEGATE_TIMEOUTS="1") == (
        "unknown environment variable SLUICEGATE_TIMEOUTS; did you mean SLUICEGATE_TIMEOUT?"
    )
    assert load("m", SLUICEGATE_OF_ANOTHER_PROGRAM="1").port == 8000


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--port=1"], "--model is required: Folder of the model."),
        (["m", "--port=70000"], "--port: Input should be less than or equal to 65535; got '70000'."),
        (["m", "--port=x"], "--port: Input should be a valid integer, unable to parse string as an integer; got 'x'."),
        (["m", "--dtype=int3"], "--dtype: Input should be 'auto' or 'float32'; got 'int3'."),
        (["m", "--timeout=0"], "--timeout: Input should be greater than 0; got '0'."),
        (["m", "--timeout=inf"], "--timeout: Input should be a finite number; got 'inf'."),
        (["m", "--port"], "argument --port: expected one argument"),
    ],
)
def test_wrong_values_name_option_limit_and_value(argv: list[str], text: str) -> None:
    assert refusal(*argv) == text


def test_wrong_values_name_the_source_they_came_from(file: Path) -> None:
    assert refusal("m", SLUICEGATE_PORT="-1").startswith("SLUICEGATE_PORT: Input should be greater than or equal to 0")
    file.write_text("port = [1]\n")
    assert refusal("m", f"--config={file}") == f"port in {file}: Input should be a valid integer; got [1]."


def test_a_rule_that_joins_options_speaks_for_itself() -> None:
    class Joined(Example):
        """Has a rule."""

        @model_validator(mode="after")
        def _consistent(self) -> Self:
            if self.port < self.timeout:
                raise ValueError(f"--port must be at least --timeout ({self.timeout}); got {self.port}.")
            return self

    with pytest.raises(SettingsError) as caught:
        Joined.load(["m", "--port=1"], {}, prog="joined")
    assert str(caught.value) == "--port must be at least --timeout (1.5); got 1."


def test_a_wrong_secret_is_not_repeated(file: Path) -> None:
    file.write_text("api_key = [31337]\n")
    assert "31337" not in refusal("m", f"--config={file}")


def test_a_file_that_cannot_be_read_is_refused(file: Path) -> None:
    assert refusal("m", f"--config={file}") == f"--config: cannot read {file}: No such file or directory."
    file.write_text("port = \n")
    assert refusal("m", f"--config={file}").startswith(f"--config: {file} is not TOML: ")


def test_from_command_line_ends_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        Example.from_command_line(["m", "--prot=1"], prog="sluicegate example")
    assert caught.value.code == 2
    assert capsys.readouterr().err == (
        "sluicegate example: unknown option --prot; did you mean --port?\nSee `sluicegate example --help`.\n"
    )


def test_help_has_every_option_and_no_internal_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load("--help")
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "An example program." in text
    for option in options_of(Example):
        assert (option.flag in text) is not option.internal


def test_secrets_are_masked_in_the_log() -> None:
    config = load("m", "--api-key=hunter2")
    assert "hunter2" not in str(config.describe())
    assert "hunter2" not in repr(config)
    assert config.describe()["model"] == "m"


def test_settings_travel_to_a_child_by_flags_and_secrets_by_its_environment(tmp_path: Path) -> None:
    config = load("m", "--port=1", "--engine=a", "--engine=b", "--no-prefix-caching", "--api-key=k", "--dtype=float32")
    argv, secrets = config.to_argv(Example), config.secrets(Example)
    assert argv == ["--model=m", "--port=1", "--engine=a", "--engine=b", "--no-prefix-caching", "--dtype=float32"]
    assert secrets == {"SLUICEGATE_API_KEY": "k"}
    assert load(*argv, **secrets) == config


def test_a_child_gets_only_the_options_that_it_has() -> None:
    class Child(Settings):
        port: int = Field(8000, description="Port.")

    assert load("m", "--port=1", "--log-level=debug").to_argv(Child) == ["--port=1", "--log-level=debug"]


def test_a_field_that_the_program_decides_is_no_option() -> None:
    class Deciding(Example):
        """Decides its port."""

        decided: ClassVar[frozenset[str]] = frozenset({"port"})

    assert "--port" not in [option.flag for option in options_of(Deciding)]
    with pytest.raises(SettingsError, match="unknown option --port"):
        Deciding.load(["m", "--port=1"], {}, prog="deciding")


def test_markdown_table_has_a_row_for_each_option() -> None:
    class Small(Settings):
        where: Annotated[Path, Positional(), Shown("the home folder")] = Field(Path("/"), description="A folder.")
        name: tuple[str, ...] = Field((), description="A name.")
        quick: bool = Field(True, description="Whether to hurry.")

    assert markdown_table(Small).splitlines()[:5] == [
        "| option | default | |",
        "|---|---|---|",
        "| `--where` or first argument | `the home folder` | A folder. |",
        "| `--name` |  | A name. Repeatable. |",
        "| `--quick` | `on` | Whether to hurry. |",
    ]


def test_the_cache_folder_follows_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert load("m").cache_dir == Path("/somewhere/sluicegate")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert load("m").cache_dir == Path.home() / ".cache/sluicegate"
