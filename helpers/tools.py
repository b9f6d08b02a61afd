"""Chats that call tools: the many ways in which files write them, brought into one."""

import json
from collections.abc import Sequence
from typing import Any

from tables.texts import text_problem

NO_RESULT = "a call without its result"
NO_CALL = "a result without its call"

Row = dict[str, Any]


def tools_of(row: Row) -> tuple[list[Row], str]:
    """(tools, problem) of a row's column `tools`, each as {"type": "function", "function": ...}.

    Files also hold them as one JSON text, or without the outer object.
    """
    tools = _from_json(row.get("tools")) or []
    if problem := _list_problem("tools", tools):
        return [], problem
    known = []
    for tool in tools:
        function = _function_of(tool)
        if function is None:
            return [], "a tool without a name"
        function = _without_nulls(function)
        if "parameters" in function:
            function["parameters"] = _from_json(function["parameters"])
            if problem := _schema_problem(function["parameters"]):
                return [], problem
        known.append({"type": "function", "function": function})
    return known, _unicode_problem("tools", known)


def calls_of(message: Row) -> tuple[list[Row], str]:
    """(calls, problem) of a message, with arguments as an object and an `id` for each."""
    if message.get("function_call"):
        return [], "function_call, the old form of tool_calls"
    calls = _from_json(message.get("tool_calls")) or []
    if problem := _list_problem("tool_calls", calls):
        return [], problem
    if calls and message["role"] != "assistant":
        return [], "a call that is not the assistant's"
    known = []
    for place, call in enumerate(calls):
        function = _function_of(call)
        if function is None:
            return [], "a call without a name"
        arguments = _from_json(function.get("arguments")) or {}
        if isinstance(arguments, str):
            return [], "a call's arguments are not JSON"
        if not isinstance(arguments, dict):
            return [], "a call's arguments are not an object"
        known.append({
            "type": "function",
            "id": call.get("id") or f"call {place}",
            "function": {"name": function["name"], "arguments": arguments},
        })
    return known, _unicode_problem("tool_calls", known)


def order_problem(messages: Sequence[Row]) -> str:
    """Do question and answer take turns, and does each call have its result? "" if so.

    Every message has its `tool_calls`, which may be empty. The last one may call.
    """
    roles = [message["role"] for message in messages]
    if not roles or roles[-1] != "assistant":
        return "no answer at the end"
    expected = "user"
    results = 0
    for message in messages:
        role = message["role"]
        if role == "system" and message is messages[0]:
            continue
        if role != expected:
            if role == "tool":
                return NO_CALL
            if expected == "tool":
                return NO_RESULT
            return "user and assistant do not take turns"
        if role == "user":
            expected = "assistant"
            continue
        if role == "assistant":
            results = len(message["tool_calls"])
            expected = "user"
        else:
            results -= 1
            expected = "assistant"
        if results:
            expected = "tool"
    return ""


def name_results(messages: Sequence[Row]) -> str:
    """Give every result the `tool_call_id` and the `name` of its call; what is wrong, or "".

    A result without an id answers the first call that still waits.
    """
    waiting: dict[str, str] = {}
    for message in messages:
        if message["role"] == "assistant":
            calls = message["tool_calls"]
            waiting = {call["id"]: call["function"]["name"] for call in calls}
            if len(waiting) < len(calls):
                return "two calls with one id"
        elif message["role"] == "tool":
            answered = message.get("tool_call_id") or next(iter(waiting))
            if answered not in waiting:
                return NO_CALL
            message["tool_call_id"] = answered
            message["name"] = waiting.pop(answered)
    return ""


def _function_of(value: Any) -> Row | None:
    """The function with its name that a tool or a call holds, or is."""
    if not isinstance(value, dict):
        return None
    function = value.get("function", value)
    if not isinstance(function, dict):
        return None
    if text_problem({"name": function.get("name")}):
        return None
    return function


def _list_problem(name: str, value: Any) -> str:
    if isinstance(value, str):
        return f"{name} are a text that is not JSON"
    if not isinstance(value, list):
        return f"{name} are not a list"
    return ""


def _schema_problem(schema: Any) -> str:
    """Why a chat template can't write these parameters of a tool, or ""."""
    if isinstance(schema, str):
        return "a tool's parameters are not JSON"
    properties = schema.get("properties", {}) if isinstance(schema, dict) else None
    if not isinstance(properties, dict):
        return "a tool's parameters are not a JSON schema"
    if not all(isinstance(inner, dict) for inner in properties.values()):
        return "a tool's parameters are not a JSON schema"
    return ""


def _from_json(value: Any) -> Any:
    """What a JSON text says; any other value, and a text that isn't JSON, as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value.strip()


def _without_nulls(value: Any) -> Any:
    """A schema without its nulls: tables of the hub fill in the keys that another row has."""
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    kept = {}
    for key, inner in value.items():
        if inner is not None:
            kept[key] = _without_nulls(inner)
    return kept


def _unicode_problem(name: str, value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text_problem({name: text})
