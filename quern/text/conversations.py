"""Converts conversations of other projects, and requests to the server, to quern's format (chat.py).

    quern, OpenAI   {"messages": [{"role": "user", "content": "…"}, …]}, or the list alone
    ShareGPT        {"conversations": [{"from": "human", "value": "…"}, …]}
    Alpaca          {"instruction": "…", "input": "…", "output": "…", "history": [["…", "…"], …]}
    pairs           {"prompt": "…", "completion": "…"}, or "response"; mixture/sources.py reads {"question", "answer"}
    ChatGPT         its export, conversations.json: {"mapping": {id: {"message": …, "parent": id}}, "current_node": id}
    WhatsApp        its export of a chat, text: "12.03.24, 18:05 - Anna: Hello"

docs/fine-tuning.md, "What is beside the text", says what becomes of system messages, tools, calls and weights. OpenAI's
`tool_calls` and `tool` messages become parts of one assistant turn: the call, its output, the text that follows. A call
is {"name":…,"arguments":…} without spaces, as generate/grammar.py has the model write it.
"""

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, cast

from quern.text.chat import ContentPart, Message, parts, validate

LISTS = ("messages", "conversations")
ALPACA = ("instruction", "input", "output", "history")
PAIRS = (("prompt", "completion"), ("prompt", "response"))
CHATGPT = ("mapping", "current_node")
ASKED = ("user", "assistant")  # the roles of a question and its answer
BESIDE = ("system", "system_prompt", "tools", "functions")  # the keys that are read beside a list of messages
KEYS = (*LISTS, *ALPACA, *dict.fromkeys(key for pair in PAIRS for key in pair), *CHATGPT, *BESIDE)
"""The keys that are read from a record."""
WEIGHTS = ("weight", "train", "training", "loss")
"""Names of the key that says whether an assistant's message is learned: OpenAI's, axolotl's and ms-swift's."""
TURN_KEYS = ("role", "content", "from", "value", "tool_calls", "tool_call_id", "function_call", *WEIGHTS)
ROLES = {"human": "user", "gpt": "assistant", "developer": "system", "function": "tool", "observation": "tool"}
"""Roles of other projects; `function_call` is the assistant's too."""
SHAREGPT = ("human", "user", "gpt", "assistant", "system", "tool", "function_call", "observation")
CALCULATOR = "calculator"
NAMES_SHOWN = 12


def to_messages(record: Any, ignored: Counter[str] | None = None) -> list[Message]:
    """Converts a JSON value in one of the shapes above to messages that pass `chat.validate`. Raises ValueError,
    TypeError, LookupError or AttributeError for another shape. ignored: counts the keys of records and of messages that
    hold something and are not read."""
    row = record if isinstance(record, Mapping) else {"messages": record}
    used, given = _shape(row)
    if used == CHATGPT:
        row = {key: row[key] for key in CHATGPT if key in row}  # titles, dates, identifiers
    if not isinstance(given, list):
        there_are = ", ".join(map(repr, list(row)[:NAMES_SHOWN])) if row is record else ""
        raise ValueError(
            f"{f'it has only {there_are}' if there_are else 'it is no object and no list of messages'}: a conversation "
            'is {"messages": [{"role": "user", "content": …}, …]}, ShareGPT\'s {"conversations": [{"from": "human", '
            '"value": …}, …]}, Alpaca\'s {"instruction": …, "input": …, "output": …}, {"prompt": …, "completion": …} '
            'or {"question": …, "answer": …}'
        )
    turns = [_turn(turn, index) for index, turn in enumerate(given)]
    tools = _describe_functions(row)
    _begin(turns, row.get("system") or row.get("system_prompt"), tools)
    joined = _join_tools(turns, own_tool=not tools)
    validate(joined)
    if ignored is not None:
        unread = {key for key, value in row.items() if key not in (*used, *BESIDE) and not _empty(value)}
        of_turns = (key for turn in given for key, value in turn.items() if key not in TURN_KEYS and not _empty(value))
        ignored.update(unread.union(f"{used[0]}.{key}" for key in of_turns))
    return [_message(turn) for turn in joined]


def _shape(row: Mapping[str, Any]) -> tuple[tuple[str, ...], Any]:
    """The keys of the list of messages in a record, and the list."""
    for key in LISTS:
        if row.get(key) is not None:
            return (key,), _loaded(row[key])
    if row.get("instruction") is not None and row.get("output") is not None:
        question = "\n\n".join(filter(None, (row["instruction"], row.get("input"))))
        exchanges = [*(row.get("history") or ()), [question, row["output"]]]
        if any(not isinstance(pair, list) or len(pair) != len(ASKED) for pair in exchanges):
            raise ValueError('"history" is a list of questions with their answers, [["…", "…"], …]')
        return ALPACA, [_said(role, text) for pair in exchanges for role, text in zip(ASKED, pair, strict=True)]
    for pair in PAIRS:
        if all(isinstance(row.get(key), str | list) for key in pair):
            sides = ((role, row[key]) for role, key in zip(ASKED, pair, strict=True))
            return pair, [turn for role, it in sides for turn in (it if isinstance(it, list) else [_said(role, it)])]
    if isinstance(row.get("mapping"), Mapping):
        return CHATGPT, _of_chatgpt(row["mapping"], row.get("current_node"))
    return (), None


def json_text(value: Any) -> str:
    """JSON as the model reads and writes it."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _empty(value: Any) -> bool:
    return value is None or value in ("", [], {})


def _of_chatgpt(nodes: Any, last: Any) -> list[dict[str, Any]]:
    """The branch that was shown last: what user and assistant wrote, in turn, without pictures and tools."""
    turns: list[tuple[str, str]] = []
    at, seen = last if last in nodes else next(reversed(nodes), None), set[Any]()
    while at in nodes and at not in seen:
        seen.add(at)
        message = nodes[at].get("message") or {}
        said = (message.get("content") or {}).get("parts") or ()
        text = "\n".join(part for part in said if isinstance(part, str)).strip()
        role = (message.get("author") or {}).get("role")
        if text and role in ("user", "assistant") and message.get("recipient", "all") == "all":
            turns.append((role, text))
        at = nodes[at].get("parent")
    return _in_turn(turns[::-1])


LINE = re.compile(
    r"^[\u200e\ufeff]*\[?(?P<day>\d{1,4}[./-]\d{1,2}[./-]\d{1,4}),?\s+\d{1,2}[:.]\d{2}([:.]\d{2})?(\s?[ap]\.?\s?m\.?)?\]?"
    r"\s*(-\s)?(?P<said>.*)$",
    re.IGNORECASE,
)
"""A line of WhatsApp's export that begins a message; others continue it."""
LEFT_OUT = re.compile(r"^<.*>$|^\u200e|omitted$|weggelassen>?$")
"""A message of WhatsApp that stands for a picture or the like."""


def of_whatsapp(text: str, person: str | None = None) -> list[list[Message]]:
    """Converts WhatsApp's export of a chat: a conversation for each day. The model learns to write as `person`. Raises
    ValueError if the text is no such export, or if the person is not named, or says nothing in it."""
    days: dict[str, list[tuple[str, str]]] = {}
    day: list[tuple[str, str]] = []
    for line in text.splitlines():
        if match := LINE.match(line):
            name, colon, said = match["said"].partition(": ")
            day = days.setdefault(match["day"], [])
            day.append((name.strip(), "" if LEFT_OUT.search(said) else said) if colon else ("", ""))
        elif day and day[-1][1]:
            day[-1] = (day[-1][0], f"{day[-1][1]}\n{line}")
    names = list(dict.fromkeys(name for one in days.values() for name, said in one if said))
    if not names:
        raise ValueError("a text is no conversation, unless WhatsApp exported it: give .jsonl, .json, .csv or .parquet")
    if person not in names:
        raise ValueError(
            f"the model learns to write as one of {', '.join(names[:NAMES_SHOWN])}: name that one, as --conversations "
            + shlex.quote(f"FILE,column={names[0]}")
        )
    roles = [[("assistant" if name == person else "user", said) for name, said in one if said] for one in days.values()]
    return [to_messages(_in_turn(one)) for one in roles]


def _in_turn(said: Iterable[tuple[str, str]]) -> list[dict[str, Any]]:
    """Messages from the user's first to the assistant's last; what one says in a row is one message. At least one."""
    turns: list[dict[str, Any]] = []
    for role, text in said:
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] += f"\n{text}"
        elif turns or role == "user":
            turns.append(_said(role, text))
    return turns[:-1] if len(turns) > 1 and turns[-1]["role"] == "user" else turns or [_said("user", "(nothing)")]


def _said(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


def _turn(turn: Any, index: int) -> Any:
    """The message with OpenAI's current keys and roles; other values unchanged."""
    if not isinstance(turn, Mapping):
        return turn
    turn, role = dict(turn), turn.get("role")
    if "from" in turn:
        role, turn["content"] = turn["from"], turn.get("value")
        if role not in SHAREGPT:
            raise ValueError(f"message {index + 1} is from {role!r}: use one of {', '.join(SHAREGPT)}")
        if role == "function_call":
            calls = _loaded(turn["content"])
            turn["tool_calls"] = [{"function": call} for call in (calls if isinstance(calls, list) else [calls])]
            role, turn["content"] = "assistant", None
    elif turn.get("function_call"):
        turn["tool_calls"] = [{"function": turn["function_call"]}]
    if role is not None:
        turn["role"] = ROLES.get(str(role), role)
    weight = next((turn[key] for key in WEIGHTS if turn.get(key) is not None), 1)
    if weight not in (0, 1):
        raise ValueError(f"message {index + 1} has the weight {weight!r}: use 1, or 0 for a reply that is not learned")
    return {**turn, "weight": int(weight)}


def _begin(turns: list[Any], system: Any, tools: str) -> None:
    """Puts what is beside the messages into the system message."""
    first = turns[0] if turns and isinstance(turns[0], Mapping) and turns[0].get("role") == "system" else None
    own = "" if first is None else "".join(part["text"] for part in parts(first))
    if system and own and own != system:
        raise ValueError("it has two system messages, one of them beside the messages: leave one")
    if system and not isinstance(system, str):
        raise ValueError(f"its system message is no text, but {type(system).__name__}")
    if system or tools:
        turns[: first is not None] = [{"role": "system", "content": "\n\n".join(filter(None, (own or system, tools)))}]


def _describe_functions(row: Mapping[str, Any]) -> str:
    """The text that tells the model of the functions of `tools`, or of the older `functions`; both may be written as
    text, as may each of them."""
    found = list[str]()
    for tool in _loaded(row.get("tools")) or _loaded(row.get("functions")) or ():
        tool = _loaded(tool)
        function = _without_nulls(tool.get("function") or tool) if isinstance(tool, Mapping) else {}
        if not isinstance(function.get("name"), str):
            raise ValueError('each of "tools" is {"type": "function", "function": {"name": …, "parameters": {…}}}')
        order = dict.fromkeys(("name", "description", "parameters", *function))
        kept = {key: function[key] for key in order if key in function and key not in ("strict", "type")}
        found.append(json_text(kept))
    return "\n".join(['You can call these tools, as {"name":"…","arguments":{…}}:', *found]) if found else ""


def _loaded(value: Any) -> Any:
    try:
        return json.loads(value or "null") if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise ValueError(f"messages, tools and calls that are text must be JSON ({error})") from error


def _without_nulls(value: Any) -> Any:
    """The value without fields that are null: Parquet fills the missing fields of an object with them."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def _join_tools(turns: Iterable[Any], own_tool: bool) -> list[Any]:
    """Joins tool calls, their outputs and the text after them into one assistant turn."""
    messages: list[Any] = []
    called: list[ContentPart] | None = None  # parts of the current assistant turn with tool calls
    waiting: list[tuple[str | None, ContentPart]] = []  # (id, call) without an output yet
    for index, turn in enumerate(turns):
        role = turn.get("role") if isinstance(turn, Mapping) else None
        if role == "tool":
            if called is None or not waiting:
                raise ValueError(f"message {index + 1} is a tool's output, and no tool_calls before it ask for one")
            asked = next((call for call in waiting if call[0] == turn.get("tool_call_id")), waiting[0])
            waiting.remove(asked)
            at = next(i for i, part in enumerate(called) if part is asked[1])
            called.insert(at + 1, {"type": "output", "text": "".join(part["text"] for part in parts(turn))})
        elif role == "assistant" and (turn.get("tool_calls") or called is not None):
            if called is None:
                called = []
                messages.append({"role": "assistant", "content": called})
            calls = turn.get("tool_calls") or ()
            waiting = [(call.get("id"), {"type": "tool", "text": _call(call, own_tool)}) for call in calls]
            own = [*parts(turn), *(part for _, part in waiting)]
            for part in own:
                part["weight"] = 0 if part.get("weight") == 0 else turn["weight"]
            called += own
            messages[-1]["weight"] = turn["weight"]
        else:
            called, waiting = None, []
            messages.append(turn)
    return messages


def _call(call: Mapping[str, Any], own_tool: bool) -> str:
    """The text of a call {"function": {"name": …, "arguments": …}}; the arguments may be a string of JSON."""
    name, arguments = call["function"]["name"], _without_nulls(call["function"].get("arguments"))
    if isinstance(arguments, str):
        with suppress(ValueError):  # a string that is not JSON is the argument itself
            arguments = _loaded(arguments)
    arguments = {} if arguments is None else arguments
    values = list(arguments.values()) if isinstance(arguments, Mapping) else [arguments]
    if own_tool and name == CALCULATOR and len(values) == 1 and isinstance(values[0], str):
        return values[0]
    return json_text({"name": name, "arguments": arguments})


def _message(turn: Mapping[str, Any]) -> Message:
    """The message without other keys. A text in several parts is one; parts that are not learned say so."""
    weight = 0 if turn["role"] == "assistant" and turn["weight"] == 0 else 1
    found = list[dict[str, Any]]()
    for part in parts(turn):
        own = weight if part.get("weight") is None else part.get("weight")
        found.append({"type": part["type"], "text": part["text"]} | ({"weight": 0} if own == 0 else {}))
    plain = all(part["type"] == "text" and "weight" not in part for part in found)
    content = "".join(str(part["text"]) for part in found) if plain else found
    return cast(Message, {"role": turn["role"], "content": content} | ({"weight": 0} if weight == 0 else {}))
