"""The `messages` of a chat request: checked, and brought into the form chat templates read.

Content parts are joined to one string, a tool call's arguments become a mapping, keys that are
null are left out (as transformers does, since templates print None).
"""

from __future__ import annotations

from gateway.errors import BadRequest
from gateway.templates import Message, parsed_arguments
from protocol.sampling import shown

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")

#: Keys that say nothing to a template. They come back when a client sends an answer it got as history.
_SILENT_KEYS = frozenset({"refusal", "annotations", "audio", "function_call"})
#: ... of which these would change the prompt if they were not empty.
_EMPTY_KEYS = ("audio", "function_call")

#: Between text parts, as vLLM joins them for templates that take strings.
_BETWEEN_PARTS = "\n"


def parse_messages(value: object) -> tuple[Message, ...]:
    """Messages in order. Raises BadRequest whose param is the place, such as `messages[2].content`."""
    if not isinstance(value, list) or not value:
        raise BadRequest(f"messages must be a list of at least one message, got {shown(value)}.", "messages")
    return tuple(_message(entry, f"messages[{i}]") for i, entry in enumerate(value))


def _message(entry: object, at: str) -> Message:
    if not isinstance(entry, dict):
        raise BadRequest(f"{at} must be an object, got {shown(entry)}.", at)
    role = entry.get("role")
    if role not in _ROLES:
        raise BadRequest(f"{at}.role must be one of {', '.join(_ROLES)}, got {shown(role)}.", f"{at}.role")
    for key in _EMPTY_KEYS:
        if entry.get(key) is not None:
            raise BadRequest(f"{at}.{key} is not supported; leave it out or null.", f"{at}.{key}")
    message: Message = {"role": role}
    for key, part in entry.items():
        if part is None or key == "role" or key in _SILENT_KEYS:
            continue
        if key == "content":
            message[key] = _content(part, f"{at}.content")
        elif key == "tool_calls":
            message[key] = _tool_calls(part, f"{at}.tool_calls")
        elif key in ("name", "tool_call_id", "reasoning", "reasoning_content"):
            # Two names for one thing; templates read the longer.
            message["reasoning_content" if key == "reasoning" else key] = _string(part, f"{at}.{key}")
        else:
            raise BadRequest(f"{at} has an unknown field {shown(key)}; leave it out.", f"{at}.{key}")
    if "content" not in message and not (role == "assistant" and message.get("tool_calls")):
        raise BadRequest(f"{at}.content is required: a string or a list of text parts.", f"{at}.content")
    return message


def _content(value: object, at: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise BadRequest(f"{at} must be a string or a list of text parts, got {shown(value)}.", at)
    return _BETWEEN_PARTS.join(_part(part, f"{at}[{i}]") for i, part in enumerate(value))


def _part(part: object, at: str) -> str:
    if not isinstance(part, dict):
        raise BadRequest(f"{at} must be an object such as {{'type': 'text', 'text': ...}}, got {shown(part)}.", at)
    kind = part.get("type")
    if kind not in ("text", "refusal"):
        raise BadRequest(f"{at}.type must be 'text', got {shown(kind)}: only text is read here.", f"{at}.type")
    return _string(part.get(kind), f"{at}.{kind}")


def _tool_calls(value: object, at: str) -> list[dict[str, object]]:
    if not isinstance(value, list):
        raise BadRequest(f"{at} must be a list, got {shown(value)}.", at)
    return [_tool_call(call, f"{at}[{i}]") for i, call in enumerate(value)]


def _tool_call(call: object, at: str) -> dict[str, object]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or call.get("type", "function") != "function":
        raise BadRequest(f"{at} must be an object with type 'function' and a function, got {shown(call)}.", at)
    arguments = function.get("arguments", "")
    if isinstance(arguments, str):
        arguments = parsed_arguments(arguments)
    elif not isinstance(arguments, dict):
        raise BadRequest(
            f"{at}.function.arguments must be a string of JSON, got {shown(arguments)}.", f"{at}.function.arguments"
        )
    name = _string(function.get("name"), f"{at}.function.name")
    named = {"id": _string(call["id"], f"{at}.id")} if call.get("id") is not None else {}
    return {**named, "type": "function", "function": {"name": name, "arguments": arguments}}


def _string(value: object, at: str) -> str:
    if not isinstance(value, str):
        raise BadRequest(f"{at} must be a string, got {shown(value)}.", at)
    return value
