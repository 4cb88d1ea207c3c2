"""Settings of every program: one field of a `Settings` class is one option, and nothing else is.

A value comes from the flag, else the environment, else the `--config` TOML file, else the
field's default. From the field follow the flag (`--max-num-seqs`), the variable
(`SLUICEGATE_MAX_NUM_SEQS`), the key in the file (`max_num_seqs`), the help text and the row in
the README. A key that no field has is an error that names the nearest one.

    class EngineConfig(Settings):
        '''Serve one model on this machine's device.'''

        model: Annotated[str, Positional()] = Field(description="Folder of the model.")
        listen: str = Field("tcp://127.0.0.1:5557", description="Address that gateways connect to.")
        max_num_seqs: int = Field(64, ge=1, description="Requests that run at the same time.")
        kv_cache_memory_bytes: ByteSize | None = Field(None, description="..., such as 2GiB.")
        engine: tuple[str, ...] = Field((), description="...")  # repeatable; commas in the environment
        api_key: SecretStr | None = Field(None, description="...")  # masked wherever it is shown

    def main(argv: Sequence[str]) -> int:
        config = EngineConfig.from_command_line(argv, prog="sluicegate engine")
        logs.configure(config.log_level, config.log_format)
        parent = Parent.attach(config.parent_pipe)  # protocol.process

No other file reads `os.environ`.
"""

from __future__ import annotations

import argparse
import difflib
import enum
import os
import sys
import tomllib
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NoReturn, Self, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError
from pydantic.fields import FieldInfo

from protocol.logs import LogFormat, LogLevel
from protocol.process import Parent

ENV_PREFIX = "SLUICEGATE_"

#: The word by which a supervisor names the pipe to it (`protocol.supervisor`).
_PARENT_PIPE = "--parent-pipe="

#: How alike two names must be (difflib ratio) for one to be offered in place of the other.
_NEAR = 0.6
#: A variable of ours may belong to another program, so only one that is nearly right is an error.
#: Of names that differ, the likest in engine and gateway have 0.905 (curve_secret_, curve_server_key_file).
_NEAR_VARIABLE = 0.91


class SettingsError(Exception):
    """A setting is unknown or wrong. The text names it, where it came from and what is allowed."""


@dataclass(frozen=True, slots=True)
class Positional:
    """Marks the field that may also be given without its flag, as in `sluicegate serve MODEL`."""


@dataclass(frozen=True, slots=True)
class Spelled:
    """Marks the field whose flag has another name, since the field's own would hide something."""

    flag: str


@dataclass(frozen=True, slots=True)
class Internal:
    """Marks a field that programs give each other: it is in no help text and no table."""


@dataclass(frozen=True, slots=True)
class Shown:
    """What help and tables say in place of a default that depends on the machine."""

    text: str


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/sluicegate`, where the variable is empty `~/.cache/sluicegate`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sluicegate"


def child_environ(secrets: Mapping[str, str]) -> dict[str, str]:
    """Environment for a child whose settings travel by flags: ours without its SLUICEGATE_ variables.

    `secrets` are the settings that do not travel by flags (`Settings.secrets`).
    """
    return {name: text for name, text in os.environ.items() if not name.startswith(ENV_PREFIX)} | dict(secrets)


class Settings(BaseModel):
    """Options that every program has, and how a program gets the values of its own."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    #: Fields that a subclass decides by itself; they are no options there.
    decided: ClassVar[frozenset[str]] = frozenset()

    config: Path | None = Field(None, description="TOML file with options, one key an option.")
    cache_dir: Annotated[Path, Shown("$XDG_CACHE_HOME/sluicegate")] = Field(
        default_factory=default_cache_dir, description="Folder for models, tokenizers and compiled kernels."
    )
    log_level: LogLevel = Field("info", description="Least severe messages that are logged.")
    log_format: LogFormat = Field("auto", description="`auto` is text on a terminal and JSON lines elsewhere.")
    parent_pipe: Annotated[int | None, Internal()] = Field(
        None, ge=0, description="Descriptor joined to the parent; its end means that the parent is gone."
    )

    @classmethod
    def load(cls, argv: Sequence[str], environ: Mapping[str, str], *, prog: str) -> Self:
        """Settings from flags, environment, file and defaults. Raises SettingsError for a wrong one."""
        options = {option.name: option for option in options_of(cls)}
        flags = _from_flags(cls, options, argv, prog)
        variables = _from_environ(options, environ)
        file = flags.get("config") or variables.get("config")
        given = (_from_file(options, Path(str(file.value))) if file else {}) | variables | flags
        try:
            return cls.model_validate({name: source.value for name, source in given.items()})
        except ValidationError as error:
            raise SettingsError("\n".join(_explain(error, options, given))) from None

    @classmethod
    def from_command_line(cls, argv: Sequence[str], *, prog: str) -> Self:
        """`load` for a program's main function: a wrong setting ends the process with status 2."""
        try:
            return cls.load(argv, os.environ, prog=prog)
        except SettingsError as error:
            sys.stderr.write(f"{prog}: {error}\nSee `{prog} --help`.\n")
            if pipes := [word for word in argv if word.startswith(_PARENT_PIPE)]:
                Parent.attach(int(pipes[-1].removeprefix(_PARENT_PIPE))).give_up(str(error))
            raise SystemExit(2) from None

    def to_argv(self, program: type[Settings]) -> list[str]:
        """Flags that give `program` the values of this object that are not its defaults.

        Secrets are left out, since a command line is public; see `secrets`.
        """
        argv, values = [], dict(self)
        for option in options_of(program):
            value = getattr(self, option.name, None)
            if option.name == "config" or option.secret or value is None:
                continue
            if value != program.model_fields[option.name].get_default(call_default_factory=True, validated_data=values):
                argv += option.flags_for(value)
        return argv

    def secrets(self, program: type[Settings]) -> dict[str, str]:
        """Environment variables that carry this object's secrets to `program`."""
        values = ((option.variable, getattr(self, option.name, None)) for option in options_of(program))
        return {variable: value.get_secret_value() for variable, value in values if isinstance(value, SecretStr)}

    def describe(self) -> dict[str, object]:
        """Every value as JSON, secrets masked; for the log."""
        return self.model_dump(mode="json", exclude={"parent_pipe"})


@dataclass(frozen=True, slots=True)
class Option:
    """One field seen from outside."""

    name: str
    help: str
    default: str
    placeholder: str
    positional: bool
    internal: bool
    repeatable: bool
    secret: bool
    boolean: bool
    flag: str

    @property
    def variable(self) -> str:
        return ENV_PREFIX + self.name.upper()

    def flags_for(self, value: Any) -> list[str]:
        """Command-line words that give this option `value`."""
        if self.boolean:
            return [self.flag if value else "--no-" + self.flag[2:]]
        values = value if self.repeatable else (value,)
        return [f"{self.flag}={_text_of(item)}" for item in values]


def options_of(settings: type[Settings]) -> tuple[Option, ...]:
    """Options of a program: the positional one, its others, those of every program."""
    options = [_option(name, field) for name, field in settings.model_fields.items() if name not in settings.decided]
    options.sort(key=lambda option: (not option.positional, option.name in Settings.model_fields))
    return tuple(options)


def markdown_table(settings: type[Settings]) -> str:
    """The README's table of a program's options."""
    rows = ["| option | default | |", "|---|---|---|"]
    for option in options_of(settings):
        if not option.internal:
            name = f"`{option.flag}`" + (" or first argument" if option.positional else "")
            repeatable = " Repeatable." if option.repeatable else ""
            rows.append(f"| {name} | {option.default and f'`{option.default}`'} | {option.help}{repeatable} |")
    return "\n".join(rows) + "\n"


def _option(name: str, field: FieldInfo) -> Option:
    marks = {type(mark): mark for mark in field.metadata}
    kind = _without_none(field.annotation)
    shown, spelled = marks.get(Shown), marks.get(Spelled)
    assert field.description, f"option {name} has no description"
    return Option(
        name=name,
        help=field.description,
        default=shown.text if isinstance(shown, Shown) else _default_text(field),
        placeholder=_placeholder(kind),
        positional=Positional in marks,
        internal=Internal in marks,
        repeatable=get_origin(kind) is tuple,
        secret=kind is SecretStr,
        boolean=kind is bool,
        flag=spelled.flag if isinstance(spelled, Spelled) else "--" + name.replace("_", "-"),
    )


def _without_none(annotation: Any) -> Any:
    if get_origin(annotation) in (Union, types.UnionType):
        (annotation,) = (part for part in get_args(annotation) if part is not type(None))
    return annotation.__value__ if hasattr(annotation, "__value__") else annotation


def _placeholder(kind: Any) -> str:
    if get_origin(kind) is tuple:
        return _placeholder(get_args(kind)[0])
    if get_origin(kind) is Literal:
        return "{" + ",".join(map(str, get_args(kind))) + "}"
    if isinstance(kind, type):
        if issubclass(kind, enum.Enum):
            return "{" + ",".join(str(member.value) for member in kind) + "}"
        for base, text in ((Path, "PATH"), (int, "N"), (float, "X")):
            if issubclass(kind, base):
                return text
    return "TEXT"


def _default_text(field: FieldInfo) -> str:
    if field.is_required() or field.default is None or field.default == ():
        return ""
    if isinstance(field.default, bool):
        return "on" if field.default else "off"
    return _text_of(field.default)


def _text_of(value: object) -> str:
    return str(value.value if isinstance(value, enum.Enum) else value)


@dataclass(frozen=True, slots=True)
class _Given:
    """A value and where it was found, for error texts."""

    value: object
    source: str


class _FlagParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsError(message)


def _from_flags(
    settings: type[Settings], options: Mapping[str, Option], argv: Sequence[str], prog: str
) -> dict[str, _Given]:
    parser = _FlagParser(
        prog=prog,
        description=settings.__doc__,
        epilog=f"A flag wins over its variable ({ENV_PREFIX}PORT for --port), that over the --config file.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    for option in options.values():
        _add_flag(parser, option)
    found, unknown = parser.parse_known_args(argv)
    for word in unknown:
        if not word.startswith("-"):
            raise SettingsError(f"unexpected argument {word!r}.")
        flag = word.partition("=")[0]
        near = difflib.get_close_matches(flag, [option.flag for option in options.values()], 1, _NEAR)
        raise SettingsError(f"unknown option {flag}{f'; did you mean {near[0]}?' if near else '.'}")
    values = vars(found)
    for option in options.values():
        bare = values.pop(f"{option.name} argument", None)
        if bare is not None:
            if option.name in values:
                raise SettingsError(f"{option.flag} is given twice: {values[option.name]!r} and {bare!r}.")
            values[option.name] = bare
    return {name: _Given(value, options[name].flag) for name, value in values.items()}


def _add_flag(parser: argparse.ArgumentParser, option: Option) -> None:
    default = f" (default: {option.default})" if option.default else ""
    text = argparse.SUPPRESS if option.internal else (option.help + default).replace("%", "%%").replace("`", "")
    if option.boolean:
        parser.add_argument(option.flag, dest=option.name, action=argparse.BooleanOptionalAction, help=text)
        return
    action = "append" if option.repeatable else "store"
    parser.add_argument(option.flag, dest=option.name, metavar=option.placeholder, action=action, help=text)
    if option.positional:
        # `nargs="?"` fills in its default where the word is absent; None says so.
        dest, metavar = f"{option.name} argument", option.name.upper()
        parser.add_argument(dest, nargs="?", metavar=metavar, default=None, help=f"the same as {option.flag}")


def _from_environ(options: Mapping[str, Option], environ: Mapping[str, str]) -> dict[str, _Given]:
    names = {option.name.upper(): option for option in options.values() if not option.internal}
    given = {}
    for variable, text in environ.items():
        if not variable.startswith(ENV_PREFIX) or not text:  # an empty variable is an unset one
            continue
        name = variable.removeprefix(ENV_PREFIX)
        if option := names.get(name):
            value = [part.strip() for part in text.split(",")] if option.repeatable else text
            given[option.name] = _Given(value, variable)
        elif near := difflib.get_close_matches(name, names, 1, _NEAR_VARIABLE):
            raise SettingsError(f"unknown environment variable {variable}; did you mean {ENV_PREFIX}{near[0]}?")
    return given


def _from_file(options: Mapping[str, Option], path: Path) -> dict[str, _Given]:
    try:
        content = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise SettingsError(f"--config: cannot read {path}: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"--config: {path} is not TOML: {error}.") from error
    allowed = {name for name, option in options.items() if not option.internal and name != "config"}
    for key in content.keys() - allowed:
        near = difflib.get_close_matches(key.replace("-", "_"), allowed, 1, _NEAR)
        raise SettingsError(f"unknown key {key} in {path}{f'; did you mean {near[0]}?' if near else '.'}")
    return {key: _Given(value, f"{key} in {path}") for key, value in content.items()}


def _explain(error: ValidationError, options: Mapping[str, Option], given: Mapping[str, _Given]) -> list[str]:
    lines = []
    for problem in error.errors(include_url=False):
        name = str(problem["loc"][0]) if problem["loc"] else ""
        text = problem["msg"].removeprefix("Value error, ").rstrip(".")
        if problem["type"] == "missing":
            lines.append(f"{options[name].flag} is required: {options[name].help}")
        elif name in given:
            value = "" if options[name].secret else f"; got {given[name].value!r}"
            lines.append(f"{given[name].source}: {text}{value}.")
        else:  # a rule that joins several options: its text names them
            lines.append(f"{text}.")
    return lines
