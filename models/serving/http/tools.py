"""Calls of tools in the texts of models: which text is a call, in the forms that chat templates teach.

Models write a call as JSON with a "name" and "arguments" (or "parameters"): between `<tool_call>` and `</tool_call>`
(Hermes, Qwen), or as the whole answer, one or a list, with `[TOOL_CALLS]` in front or not (Llama 3, Mistral).
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Mapping
from typing import Any

BEGIN = "<tool_call>"
_BLOCK = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)


def call_schema(tools: Mapping[str, Mapping[str, Any] | None]) -> dict[str, Any]:
    """The JSON schema of a call of one of `tools`, which gives the schema of the arguments by name, None for any
    arguments."""
    calls, shared = [], {}
    for i, (name, parameters) in enumerate(tools.items()):
        shared[str(i)] = _moved(parameters or {"type": "object"}, i)
        properties = {"name": {"const": name}, "arguments": {"type": "object", "$ref": f"#/$defs/{i}"}}
        call = {"type": "object", "properties": properties, "required": ["name", "arguments"]}
        calls.append(call | {"additionalProperties": False})
    return {"anyOf": calls, "$defs": shared}


def _moved(schema: Any, i: int) -> Any:
    """A part of schema number i, its references changed to the place that the schema has among the definitions."""
    if isinstance(schema, list):
        return [_moved(item, i) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {key: _moved(value, i) for key, value in schema.items()}
    place = moved.get("$ref")
    inside = isinstance(place, str) and (place == "#" or place.startswith("#/"))
    return moved | {"$ref": f"#/$defs/{i}{place[1:]}"} if inside else moved


class CallReader:
    """Parts the text of an answer from its calls of the tools `names`. Text that may be a call is held back to the
    end."""

    def __init__(self, names: Collection[str]):
        self._names = frozenset(names)
        self._held, self._begun, self._calls_only = "", False, True

    def push(self, text: str) -> str:
        """The text that a piece of the answer sets free."""
        self._held += text
        if self._begun:
            return ""
        front = self._held.lstrip()
        if self._calls_only and (not front or front[0] in "{["):
            self._begun = bool(front)
            return ""
        at = self._held.find(BEGIN)
        self._begun = at >= 0
        if not self._begun:  # the last characters may begin a mark
            ends = (n for n in range(len(BEGIN) - 1, 0, -1) if self._held.endswith(BEGIN[:n]))
            at = len(self._held) - next(ends, 0)
        free, self._held = self._held[:at], self._held[at:]
        self._calls_only = self._calls_only and not free
        return free

    def finish(self) -> tuple[str, list[dict]]:
        """(the rest of the text, the calls), at the end of the answer."""
        calls = self._calls()
        return ("", calls) if calls else (self._held, [])

    def _calls(self) -> list[dict]:
        """The calls in the text that was held back; none if any part of it is no call of a known tool."""
        text = self._held.strip().removeprefix("[TOOL_CALLS]")
        calls: list[dict] = []
        for body in _BLOCK.findall(text) if BEGIN in text else [text]:
            try:
                found = json.loads(body)
            except (ValueError, RecursionError):
                return []
            for item in found if isinstance(found, list) else [found]:
                call = self._call(item)
                if call is None:
                    return []
                calls.append(call)
        return calls

    def _call(self, item: Any) -> dict | None:
        if not isinstance(item, dict) or item.get("name") not in self._names:
            return None
        arguments = item.get("arguments", item.get("parameters", {}))
        if not isinstance(arguments, dict):
            return None
        function = {"name": item["name"], "arguments": json.dumps(arguments, ensure_ascii=False)}
        return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
