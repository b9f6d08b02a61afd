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
NO_PROPERTIES = "parameters of a tool that are not under properties, as in xLAM"
ROLES = ("system", "user", "assistant", "tool")
# By these words a schema may allow keys that its own properties don't name.
ELSEWHERE = ("$ref", "anyOf", "oneOf", "allOf", "additionalProperties")
# Under these words parameters hold an object that isn't a parameter.
DEFINITIONS = ("$defs", "definitions", "additionalProperties")
# What is said of rows that are kept.
NULLS = "null arguments that the tool lacks"
UNDECLARED = "a call of a function that is not among the tools"

Row = dict[str, Any]


def tools_of(row: Row) -> tuple[list[Row], str]:
    """(tools, problem) of a row's column `tools`, each as {"type": "function", "function": ...}.

    Files also hold them as one JSON text, or without the outer object. A tool without a description
    has None, as vLLM (0.32) hands it to the chat template, which then writes "None".
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
        function.setdefault("description", None)
        if "parameters" in function:
            schema = _without_nulls(_from_json(function["parameters"]))
            problem = _parameters_problem(schema)
            if problem:
                return [], problem
            function["parameters"] = schema
        known.append({"type": "function", "function": function})
    return known, _unicode_problem("tools", known)


def calls_of(message: Row) -> tuple[list[Row], str]:
    """(calls, problem) of a message, with arguments as an object and an `id` for each."""
    if message.get("function_call"):
        return [], "function_call, the old form of tool_calls"
    if message.get("tool_responses"):
        return [], "tool_responses, which we take as messages of role tool"
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
    for role in roles:
        if role not in ROLES:
            return f"role {role!r:.40} is none of system, user, assistant and tool"
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

    Args:
      messages: in an order that `order_problem` has nothing against.

    Returns:
      The problem, or "".
    """
    for place, message in enumerate(messages):
        calls = message["tool_calls"]
        names = {call["id"]: call["function"]["name"] for call in calls}
        if len(names) < len(calls):
            return "two calls with one id"
        results = messages[place + 1:place + 1 + len(calls)]
        _give_ids(calls, results)
        for result in results:
            answered = result["tool_call_id"]
            if answered not in list(names):  # a list, because a damaged row may have any id
                return NO_CALL
            result["name"] = names.pop(answered)
    return ""


def _give_ids(calls: Sequence[Row], results: Sequence[Row]) -> None:
    """Give a result without an id that of the first call that waits under its name.

    If there's none, it gets that of the first call that still waits in the end.
    """
    answered = [result.get("tool_call_id") for result in results]
    waiting = [call for call in calls if call["id"] not in answered]
    unnamed = []
    for result in results:
        if result.get("tool_call_id"):
            continue
        named = [call for call in waiting if call["function"]["name"] == result.get("name")]
        if named:
            result["tool_call_id"] = named[0]["id"]
            waiting.remove(named[0])
        else:
            unnamed.append(result)
    for result, call in zip(unnamed, waiting, strict=False):
        result["tool_call_id"] = call["id"]


# ── What the tools know of the calls ──


def calls_another(calls: Sequence[Row], functions: Sequence[Row]) -> bool:
    """Is there a call of a function that isn't among the tools?"""
    declared = [tool["function"]["name"] for tool in functions]
    for call in calls:
        if call["function"]["name"] not in declared:
            return True
    return False


def drop_nulls(calls: Sequence[Row], functions: Sequence[Row]) -> bool:
    """Take null arguments out of calls, where the tool's schema doesn't have their keys.

    Tables of the hub fill in the arguments that another row's calls have.

    Args:
      calls: from `calls_of`; they're changed.
      functions: from `tools_of`.

    Returns:
      Was there one?
    """
    schemas = {}
    for tool in functions:
        function = tool["function"]
        schemas[function["name"]] = function.get("parameters", {})
    found = False
    for call in calls:
        function = call["function"]
        schema = schemas.get(function["name"], {})
        kept = _without_unknown_nulls(function["arguments"], schema)
        if kept != function["arguments"]:
            function["arguments"] = kept
            found = True
    return found


def _without_unknown_nulls(value: Any, schema: Any) -> Any:
    """Arguments, or a part of them, without the nulls whose keys their schema doesn't have."""
    if not isinstance(schema, dict):
        schema = {}
    if any(schema.get(word) for word in ELSEWHERE):
        return value
    if isinstance(value, list):
        items = schema.get("items")
        return [_without_unknown_nulls(inner, items) for inner in value]
    if not isinstance(value, dict):
        return value
    properties = schema.get("properties", {})
    kept = {}
    for key, inner in value.items():
        if inner is not None or key in properties:
            kept[key] = _without_unknown_nulls(inner, properties.get(key))
    return kept


# ── Forms ──


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


def _parameters_problem(schema: Any) -> str:
    """Why a chat template can't write these parameters of a tool, or ""."""
    if isinstance(schema, str):
        return "a tool's parameters are not JSON"
    if not isinstance(schema, dict):
        return NO_SCHEMA
    if "properties" not in schema:
        for key, inner in schema.items():
            if isinstance(inner, dict) and key not in DEFINITIONS:
                return NO_PROPERTIES
    return _schema_problem(schema)


def _schema_problem(schema: Any) -> str:
    """Why a chat template can't write a JSON schema, or one of those in it; or "".

    Where there are no properties, Gemma 4's template takes every other key for one.
    """
    if not isinstance(schema, dict):
        return NO_SCHEMA
    if not _is_texts(schema.get("required", [])):
        return "required, in a tool, is not a list of names"
    kind = schema.get("type", "")
    if not isinstance(kind, str) and not _is_texts(kind):
        return "type, in a tool, is neither text nor a list of texts"
    properties = schema.get("properties", {})
    if not isinstance(properties, dict):
        return NO_SCHEMA

    schemas = list(properties.values())
    for key, inner in schema.items():
        is_written = key == "items" or "properties" not in schema
        if is_written and isinstance(inner, dict):
            schemas.append(inner)
    for inner in schemas:
        problem = _schema_problem(inner)
        if problem:
            return problem
    return ""


def _is_texts(value: Any) -> bool:
    """Is it a list of texts, which may be empty?"""
    return isinstance(value, list) and all(isinstance(inner, str) for inner in value)


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
