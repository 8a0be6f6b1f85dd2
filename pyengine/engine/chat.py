"""Chat messages to text, through the model's chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pyengine.errors import InvalidRequestError, UnsupportedError
from pyengine.inputs import ChatPrompt

#: names that `apply_chat_template` keeps for itself; a client's extra arguments are for the template
_RESERVED = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "truncation",
    }
)


def _content(where: str, content: Any) -> str:
    """A message's content as templates expect it: text."""
    if isinstance(content, str):
        return content
    if content is None:
        raise InvalidRequestError("messages", f"{where}: content must not be null")
    if not isinstance(content, Sequence):
        raise InvalidRequestError("messages", f"{where}: content must be text or a list of parts")
    texts: list[str] = []
    for part in content:
        if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
            raise InvalidRequestError("messages", f"{where}: every part of the content must be an object with a type")
        if part["type"] != "text":
            raise UnsupportedError("messages", f"{where}: content of type {part['type']!r} is not supported; text is")
        if not isinstance(part.get("text"), str):
            raise InvalidRequestError("messages", f"{where}: a text part must have a text")
        texts.append(part["text"])
    return "\n".join(texts)


def _checked_messages(messages: Any) -> list[dict[str, Any]]:
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise InvalidRequestError("messages", "must be a list of messages")
    if not messages:
        raise InvalidRequestError("messages", "must not be empty")
    checked: list[dict[str, Any]] = []
    for i, message in enumerate(messages):
        where = f"message {i}"
        if not isinstance(message, Mapping):
            raise InvalidRequestError("messages", f"{where}: must be an object with a role and a content")
        if not isinstance(message.get("role"), str) or not message["role"]:
            raise InvalidRequestError("messages", f"{where}: must have a role")
        copy = dict(message)
        if "tool_calls" in copy and copy["tool_calls"] in (None, [], ()):
            del copy["tool_calls"]  # clients send back answers with all their nulls, and templates ask whether the key is there
        if "tool_calls" in copy:
            copy["tool_calls"] = _tool_calls(i, copy["tool_calls"])
        elif "content" not in copy:
            raise InvalidRequestError("messages", f"{where}: must have a content")
        # Where an assistant called tools, that is its message, and templates know a null content.
        if "content" in copy and not (copy["content"] is None and "tool_calls" in copy):
            copy["content"] = _content(where, copy["content"])
        checked.append(copy)
    return checked


def _tool_calls(i: int, calls: Any) -> list[Any]:
    """Message `i`'s calls of tools, with their arguments as templates expect them: objects, which they turn into JSON."""
    if isinstance(calls, str | bytes | Mapping) or not isinstance(calls, Sequence):
        raise InvalidRequestError(f"messages[{i}].tool_calls", "must be a list of tool calls")
    parsed: list[Any] = []
    for j, call in enumerate(calls):
        if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
            raise InvalidRequestError(f"messages[{i}].tool_calls[{j}]", "must be an object with a function")
        arguments = _arguments(f"messages[{i}].tool_calls[{j}].function.arguments", call["function"].get("arguments"))
        parsed.append({**call, "function": {**call["function"], "arguments": arguments}})
    return parsed


def _arguments(field: str, arguments: Any) -> Mapping[str, Any]:
    if arguments is None or arguments == "":  # a tool without parameters
        return {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, Mapping):
        raise InvalidRequestError(field, "must be a JSON object, or the text of one")
    return arguments


def render_chat(tokenizer: Any, prompt: ChatPrompt) -> str:
    """The text that the model is to continue.

    Args:
        tokenizer: a Transformers tokenizer.
        prompt: messages and template options.

    Raises:
        InvalidRequestError: for malformed messages, for a model without a template, and where the template itself refuses.
        UnsupportedError: for message parts that are not text.
    """
    from jinja2.exceptions import TemplateError

    messages = _checked_messages(prompt.messages)
    if prompt.chat_template is None and getattr(tokenizer, "chat_template", None) is None:
        raise InvalidRequestError("messages", "this model has no chat template; send a prompt, or a chat_template with it")
    if prompt.add_generation_prompt and prompt.continue_final_message:
        raise InvalidRequestError("continue_final_message", "cannot be combined with add_generation_prompt")
    reserved = _RESERVED & prompt.chat_template_kwargs.keys()
    if reserved:
        raise InvalidRequestError("chat_template_kwargs", f"{min(reserved)!r} is not for the template to set")
    try:
        text = tokenizer.apply_chat_template(
            messages,
            chat_template=prompt.chat_template,
            add_generation_prompt=prompt.add_generation_prompt,
            continue_final_message=prompt.continue_final_message,
            tokenize=False,
            **prompt.chat_template_kwargs,
        )
    except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        # Everything that runs here is the template on the client's messages.
        field = "messages" if prompt.chat_template is None else "chat_template"
        raise InvalidRequestError(field, f"the chat template refuses them: {error}") from error
    if not isinstance(text, str):
        raise InvalidRequestError("messages", "the chat template gave no text")
    return text
