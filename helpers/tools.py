"""Chats that call tools: files write them in many ways, and here they all become one.

As in `data`, a problem is the reason why a row is dropped, or "".
"""

import json
from collections.abc import Sequence
from typing import Any

from tables.texts import text_problem

NO_RESULT = "a call without its result"
NO_CALL = "a result without its call"
NO_SCHEMA = "a tool's parameters are not a JSON schema"

Row = dict[str, Any]


def tools_of(row: Row) -> tuple[list[Row], str]:
    """(tools, problem) of a row's column `tools`, each as {"type": "function", "function": ...}.

    Files also hold them as one JSON text, or without the outer object.
    """
    tools = _from_json(row.get("tools")) or []
    problem = _list_problem("tools", tools)
    if problem:
        return [], problem
    known = []
    for tool in tools:
        function = _function_of(tool)
        if function is None:
            return [], "a tool without a name"
        function = _without_nulls(function)
        if "parameters" in function:
            schema = _from_json(function["parameters"])
            problem = _schema_problem(schema)
            if problem:
                return [], problem
            function["parameters"] = schema
        known.append({"type": "function", "function": function})
    return known, _unicode_problem("tools", known)


def calls_of(message: Row) -> tuple[list[Row], str]:
    """(calls, problem) of a message, with arguments as an object and an `id` for each."""
    if message.get("function_call"):
        return [], "function_call, the old form of tool_calls"
    calls = _from_json(message.get("tool_calls")) or []
    problem = _list_problem("tool_calls", calls)
    if problem:
        return [], problem
    if calls and message["role"] != "assistant":
        return [], "a call that is not the assistant's"
    known = []
    for place, call in enumerate(calls):
        complete, problem = _complete_call(call, place)
        if problem:
            return [], problem
        known.append(complete)
    return known, _unicode_problem("tool_calls", known)


def _complete_call(call: Any, place: int) -> tuple[Row, str]:
    """(call, problem): one call of a message, whose `place` becomes its id if it has none."""
    function = _function_of(call)
    if function is None:
        return {}, "a call without a name"
    arguments = _from_json(function.get("arguments")) or {}
    if isinstance(arguments, str):
        return {}, "a call's arguments are not JSON"
    if not isinstance(arguments, dict):
        return {}, "a call's arguments are not an object"
    number = call.get("id") or f"call {place}"
    if not isinstance(number, (str, int)):
        return {}, "a call's id is neither text nor a number"
    complete = {
        "type": "function",
        "id": number,
        "function": {"name": function["name"], "arguments": arguments},
    }
    return complete, ""


def order_problem(messages: Sequence[Row]) -> str:
    """What's wrong with the order of a chat; "" if turns alternate and each call has its result.

    Args:
      messages: each with its `tool_calls`, which may be empty. The last one may call.
    """
    roles = [message["role"] for message in messages]
    if not roles or roles[-1] != "assistant":
        return "no answer at the end"
    expected = "user"
    open_calls = 0  # those that have no result yet
    for message in messages:
        role = message["role"]
        if role == "system" and message is messages[0]:
            continue
        if role != expected:
            return _disorder(role, expected)
        if role == "user":
            expected = "assistant"
            continue

        if role == "assistant":
            open_calls = len(message["tool_calls"])
            expected = "user"
        else:
            open_calls -= 1
            expected = "assistant"
        if open_calls:
            expected = "tool"
    return ""


def _disorder(role: str, expected: str) -> str:
    """What's wrong where somebody else speaks than was expected."""
    if role == "tool":
        return NO_CALL
    if expected == "tool":
        return NO_RESULT
    return "user and assistant do not take turns"


def name_results(messages: Sequence[Row]) -> str:
    """Give every result the `tool_call_id` and the `name` of its call.

    A result without an id answers the first call that still waits.

    Returns:
      The problem, or "".
    """
    waiting: dict[str, str] = {}  # the names of the calls without a result, by id
    for message in messages:
        if message["role"] == "assistant":
            waiting = {}
            for call in message["tool_calls"]:
                if call["id"] in waiting:
                    return "two calls with one id"
                waiting[call["id"]] = call["function"]["name"]
        elif message["role"] == "tool":
            answered = message.get("tool_call_id")
            if not answered:
                answered = next(iter(waiting))
            if answered not in list(waiting):  # a list, because a damaged row may have any id
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
    """Why the column or key `name` doesn't hold a list, or ""."""
    if isinstance(value, str):
        return f"{name} are a text that is not JSON"
    if not isinstance(value, list):
        return f"{name} are not a list"
    return ""


def _schema_problem(schema: Any) -> str:
    """Why a chat template can't write these parameters of a tool, or ""."""
    if isinstance(schema, str):
        return "a tool's parameters are not JSON"
    if not isinstance(schema, dict):
        return NO_SCHEMA
    properties = schema.get("properties", {})
    if not isinstance(properties, dict):
        return NO_SCHEMA
    for inner in properties.values():
        if not isinstance(inner, dict):
            return NO_SCHEMA
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
    """Why a structure's texts can't be encoded, or ""; half of a surrogate pair can't."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text_problem({name: text})
