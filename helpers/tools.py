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
# What is used of a tool's function: vLLM (0.32) hands no more of it to the chat template.
USED = ("type", "name", "description", "parameters")
# By these words a schema may allow keys that its own properties don't name.
ELSEWHERE = ("$ref", "anyOf", "oneOf", "allOf", "additionalProperties", "patternProperties")
# Under these words parameters hold an object that isn't a parameter.
NOT_PARAMETERS = ("$defs", "definitions", "additionalProperties", "patternProperties", "default",
                 "example")
# JSON Schema's types of which no value is null.
NOT_NULL = ("string", "number", "integer", "boolean", "array", "object")
# What is said of rows that are kept.
NULLS = "null arguments that the tool does not take"
UNDECLARED = "a call of a function that is not among the tools"

Row = dict[str, Any]


def tools_of(row: Row) -> tuple[list[Row], str]:
    """(tools, problem) of a row's column `tools`, each as {"type": "function", "function": ...}.

    Files also hold them as one JSON text, or each as a text, or without the outer object. A tool
    without a description has None, as vLLM hands it to the chat template, which then writes "None".
    """
    tools = _from_json(row.get("tools")) or []
    problem = _list_problem("tools", tools)
    if problem:
        return [], problem
    known = []
    for tool in tools:
        function = _function_of(_from_json(tool))
        if function is None:
            return [], "a tool without a name"
        used = {"name": function["name"], "description": function.get("description")}
        if function.get("parameters") is not None:
            schema = _without_nulls(_from_json(function["parameters"]))
            problem = _parameters_problem(schema)
            if problem:
                return [], problem
            used["parameters"] = schema
        known.append({"type": "function", "function": used})
    return known, _unicode_problem("tools", known)


def unused_keys(row: Row) -> list[str]:
    """Keys of a row's tools that say something and that we don't use.

    Args:
      row: `tools_of` has nothing against it.
    """
    unused = []
    for tool in _from_json(row.get("tools")) or []:
        function = _function_of(_from_json(tool)) or {}
        for key, value in function.items():
            if value and key not in USED:
                unused.append(f"{key} of tools")
    return unused


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
    if role == "system":
        return "a system message that is not the first"
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


def without_filled_nulls(message: Row, functions: Sequence[Row]) -> Row:
    """A message without the null arguments that a call's tool doesn't take.

    Tables of the hub fill in the arguments that another row's calls have. They can't fill them into
    arguments that are a JSON text, so those stay as they are.

    Args:
      message: with calls in any form, or without.
      functions: from `tools_of`.
    """
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    schemas = {}
    for tool in functions:
        function = tool["function"]
        schemas[function["name"]] = function.get("parameters")
    kept = []
    for call in calls:
        function = _function_of(call)
        if function is not None and isinstance(function.get("arguments"), dict):
            schema = schemas.get(function["name"])
            arguments = _kept_arguments(function["arguments"], schema)
            if arguments != function["arguments"]:
                call = {**call, "function": {**function, "arguments": arguments}}
        kept.append(call)
    return {**message, "tool_calls": kept}


def _kept_arguments(value: Any, schema: Any) -> Any:
    """Arguments, or a part of them, without nulls but those that their schema may allow."""
    if not isinstance(schema, dict):
        schema = {}
    if any(schema.get(word) for word in ELSEWHERE):
        return value
    if isinstance(value, list):
        items = schema.get("items")
        return [_kept_arguments(inner, items) for inner in value]
    if not isinstance(value, dict):
        return value
    properties = schema.get("properties", {})
    kept = {}
    for key, inner in value.items():
        if inner is not None or _may_be_null(properties.get(key)):
            kept[key] = _kept_arguments(inner, properties.get(key))
    return kept


def _may_be_null(schema: Row | None) -> bool:
    """May an argument be null, by its schema? None is that of an argument that the tool lacks."""
    if schema is None:
        return False
    return bool(schema.get("nullable")) or schema.get("type") not in NOT_NULL


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
            if isinstance(inner, dict) and key not in NOT_PARAMETERS:
                return NO_PROPERTIES
    return _schema_problem(schema)


def _schema_problem(schema: Any, is_property: bool = False) -> str:
    """Why a chat template can't write a JSON schema, or one of those in it; or "".

    Gemma 4's template writes a property's type as it is. It reads `required` only if the property
    is an object, so others may have true or false there, as in JSON Schema until 2012. And if an
    object has no properties, the template takes every other key of it for one.

    Args:
      schema: of a tool's parameters, of an array's items, or of a property.
      is_property: is it a property's?
    """
    if not isinstance(schema, dict):
        return NO_SCHEMA
    kind = schema.get("type", "")
    required = schema.get("required", [])
    properties = schema.get("properties", {})
    is_object = str(kind).upper() == "OBJECT"

    reads_required = not is_property or (is_object and required)
    if reads_required and not _is_texts(required):
        return "required, in a tool, is not a list of names"
    if not is_property and not isinstance(kind, (str, list)):
        return "type, in a tool, is neither text nor a list"
    if not isinstance(properties, dict):
        return NO_SCHEMA

    inner_properties = list(properties.values())
    if is_property and is_object and "properties" not in schema:
        inner_properties = [inner for inner in schema.values() if isinstance(inner, dict)]
    for inner in inner_properties:
        problem = _schema_problem(inner, is_property=True)
        if problem:
            return problem
    items = schema.get("items")
    if isinstance(items, dict):
        return _schema_problem(items)
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
