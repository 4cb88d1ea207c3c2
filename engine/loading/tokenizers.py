"""The tokenizer files of a model folder, as the bundle that gateways fetch.

A folder without tokenizer.json has one made of the older files there are, so that gateways know one
kind of tokenizer alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tokenizers import AddedToken, Tokenizer, processors

from engine.loading import vocabularies
from engine.loading.sentencepiece import SentencePieceModel
from engine.loading.store import ModelError, ModelFolder
from protocol import bundle

_TOKENIZER, _CONFIG, _TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
_ADDED = "added_tokens.json"

#: What the chat models of Qwen's first generation were trained on, which they have in code and not in a template.
_CHATML = """\
{%- if messages and messages[0]["role"] != "system" -%}
{{- "<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n" -}}
{%- endif -%}
{%- for message in messages -%}
{{- "<|im_start|>" + message["role"] + "\\n" + message["content"] + "<|im_end|>\\n" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- "<|im_start|>assistant\\n" -}}
{%- endif -%}
"""


@dataclass(frozen=True, slots=True)
class _Older:
    """Files of a kind, all of which must be there, and what makes a tokenizer of them and tokenizer_config.json."""

    files: tuple[str, ...]
    make: Callable[[ModelFolder, Mapping[str, object]], Tokenizer]


def tokenizer_bundle(folder: ModelFolder) -> bytes:
    """Packed bundle of the tokenizer files there are. Raises ModelError when they make no tokenizer.

    The chat template may be in tokenizer_config.json, in chat_template.jinja or in chat_template.json; the first two
    are in the bundle as they are, the third as the second, and the gateway, which renders it, decides. A model that
    says its chat format is ChatML and has no template gets that one.
    """
    files = {name: folder.read_text(name) for name in bundle.NAMES if folder.has(name)}
    if _TOKENIZER not in files:
        files[_TOKENIZER] = _converted(folder)
    if _TEMPLATE not in files and (template := _template(folder)) is not None:
        files[_TEMPLATE] = template
    try:
        return bundle.pack(files)
    except bundle.BundleError as error:
        raise ModelError(f"{folder.path}: {error}") from error


def _template(folder: ModelFolder) -> str | None:
    """The chat template of a folder without chat_template.jinja, if it is not in tokenizer_config.json."""
    if folder.has("chat_template.json"):
        template = folder.read_object("chat_template.json").get("chat_template")
        if not isinstance(template, str):
            raise ModelError(f"{folder.path / 'chat_template.json'} must hold a string named chat_template.")
        return template
    in_code = _object(folder, "generation_config.json").get("chat_format") == "chatml"
    return _CHATML if in_code and _object(folder, _CONFIG).get("chat_template") is None else None


def _converted(folder: ModelFolder) -> str:
    """A tokenizer.json of older files."""
    config = folder.read_object(_CONFIG) if folder.has(_CONFIG) else {}
    for kind in _OLDER:
        if all(folder.has(name) for name in kind.files):
            tokenizer = kind.make(folder, config)
            _add_tokens(tokenizer, folder, config)
            text: str = tokenizer.to_str()
            return text
    kinds = ", ".join(" and ".join(kind.files) for kind in _OLDER)
    raise ModelError(f"{folder.path} has no {_TOKENIZER}, nor what one is made of: {kinds}. Fetch the model again.")


def _sentencepiece(folder: ModelFolder, config: Mapping[str, object]) -> Tokenizer:
    model = SentencePieceModel.parse(folder.read_bytes("tokenizer.model"))
    tokenizer = model.tokenizer(prefix_every_part=config.get("legacy") is not False)
    bos = _text(config.get("bos_token")) or "<s>"
    bos_id = tokenizer.token_to_id(bos)
    if config.get("add_bos_token") is not False and bos_id is not None:
        tokenizer.post_processor = processors.TemplateProcessing(f"{bos}:0 $A:0", f"{bos}:0 $A:0 $B:1", [(bos, bos_id)])
    return tokenizer


def _byte_level(folder: ModelFolder, config: Mapping[str, object]) -> Tokenizer:
    return vocabularies.byte_level(
        folder.read_text("vocab.json"),
        folder.read_text("merges.txt"),
        qwen=str(config.get("tokenizer_class", "")).startswith("Qwen"),
        add_prefix_space=config.get("add_prefix_space") is True,
    )


def _qwen(folder: ModelFolder, config: Mapping[str, object]) -> Tokenizer:
    del config
    return vocabularies.qwen_tiktoken(folder.read_text("qwen.tiktoken"))


def _word_piece(folder: ModelFolder, config: Mapping[str, object]) -> Tokenizer:
    lowercase = config.get("do_lower_case") is not False
    return vocabularies.word_piece(folder.read_text("vocab.txt"), lowercase=lowercase)


_OLDER = (
    _Older(("tokenizer.model",), _sentencepiece),
    _Older(("vocab.json", "merges.txt"), _byte_level),
    _Older(("qwen.tiktoken",), _qwen),
    _Older(("vocab.txt",), _word_piece),
)


def _add_tokens(tokenizer: Tokenizer, folder: ModelFolder, config: Mapping[str, object]) -> None:
    """Those that stand beside the vocabulary, at their ids; raises ModelError when another has that id."""
    named = _special_texts(_object(folder, "special_tokens_map.json") | dict(config))
    tokens: dict[int, AddedToken] = {}
    for text, number in _object(folder, _ADDED).items():
        if isinstance(number, int):
            tokens[number] = AddedToken(text, special=text in named, normalized=False)
    described = config.get("added_tokens_decoder")
    for number, entry in described.items() if isinstance(described, Mapping) else ():
        content = _text(entry)
        if content is not None and isinstance(entry, Mapping) and str(number).isdecimal():
            flags = {name: entry.get(name) is True for name in ("special", "single_word", "lstrip", "rstrip")}
            tokens[int(number)] = AddedToken(content, normalized=entry.get("normalized") is True, **flags)
    for number, token in sorted(tokens.items()):
        tokenizer.add_tokens([token])
        if (found := tokenizer.token_to_id(token.content)) != number:
            raise ModelError(
                f"{folder.path}: the added token {token.content!r} has the id {number} there and would have {found}; "
                f"the vocabulary is of another model or not whole. Fetch the tokenizer again."
            )
    added = {token.content for token in tokens.values()}
    in_vocabulary = [text for text in named if text not in added and tokenizer.token_to_id(text) is not None]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in in_vocabulary])


def _special_texts(config: Mapping[str, object]) -> list[str]:
    """The tokens that a config names as special."""
    values = [value for name, value in config.items() if name.endswith("_token")]
    for name in ("additional_special_tokens", "extra_special_tokens"):
        more = config.get(name)
        values += more if isinstance(more, list) else []
    return list(dict.fromkeys(text for value in values if (text := _text(value))))


def _object(folder: ModelFolder, name: str) -> dict[str, object]:
    return folder.read_object(name) if folder.has(name) else {}


def _text(token: object) -> str | None:
    """A special token, which is a string or an object with its content."""
    value = token.get("content") if isinstance(token, Mapping) else token
    return value if isinstance(value, str) else None
