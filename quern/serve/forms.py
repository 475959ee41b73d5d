"""The form that a request demands of the reply: `response_format`, `structured_outputs`, `tools`, `tool_choice`.

`structured_outputs` (json, regex or choice) is vLLM's addition. The caller's tools are described to the model in the
system message; a call is one JSON object between the model's own tool tokens, and its form is enforced.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from quern.generate.grammar import Grammar, GrammarError, Grammars
from quern.serve.errors import Items, Strict, invalid

MAX_TOOLS = 64
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
_Schema = dict[str, Any]
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


class JsonSchema(Strict):
    name: Name
    schema_: Annotated[_Schema, Field(alias="schema")]
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Strict):
    """Exactly one of these."""

    json_: Annotated[_Schema | None, Field(alias="json")] = None
    regex: Annotated[str | None, Field(min_length=1, max_length=4096)] = None
    choice: Annotated[Items[Annotated[str, Field(min_length=1)]] | None, Field(min_length=1, max_length=1024)] = None


class Function(Strict):
    name: Name
    description: str | None = None
    parameters: _Schema | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool


def form_of(
    grammars: Grammars, response_format: ResponseFormat | None, structured: StructuredOutputs | None
) -> tuple[Grammar, str]:
    """The form of the reply's text, and the field that demands it. Raises ApiError for one that cannot be followed."""
    if structured is not None:
        given = {name: value for name, value in structured if value is not None}
        if len(given) != 1 or (response_format is not None and response_format.type != "text"):
            raise invalid("structured_outputs", "give exactly one of json, regex and choice, and no response_format")
        [(name, value)] = given.items()
        name = name.rstrip("_")
        return _compiled(getattr(grammars, name), value, f"structured_outputs.{name}"), f"structured_outputs.{name}"
    own = None if response_format is None else response_format.json_schema
    param = "response_format" if own is None else "response_format.json_schema.schema"
    return _compiled(grammars.json, {"type": "object"} if own is None else own.schema_, param), param


def _compiled(compile: Callable[[Any], Grammar], form: Any, param: str) -> Grammar:
    try:
        return compile(form)
    except GrammarError as error:
        raise invalid(param, error) from None


def calls_of(grammars: Grammars, tools: Sequence[Tool], choice: ToolChoice | None) -> Grammar:
    """The form of a call. Raises ApiError for a wrong schema or an unknown name."""
    if not tools:
        raise invalid("tool_choice", "there are no tools: send them in 'tools'")
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise invalid("tools", f"two of them are called '{max(names, key=names.count)}'")
    wanted = choice.function.name if isinstance(choice, NamedTool) else None
    if wanted is not None and wanted not in names:
        raise invalid("tool_choice", f"'{wanted}' is none of the tools: {', '.join(names)}")
    calls, definitions = [], {}
    for number, tool in enumerate(tools):
        if wanted in (None, tool.function.name):
            arguments = tool.function.parameters or NO_ARGUMENTS
            _compiled(grammars.json, arguments, f"tools[{number}].function.parameters")
            place = f"#/$defs/tool{number}"
            definitions[f"tool{number}"] = _moved(arguments, place)
            properties = {"name": {"const": tool.function.name}, "arguments": {"$ref": place}}
            calls.append({**NO_ARGUMENTS, "properties": properties, "required": ["name", "arguments"]})
    return _compiled(grammars.json, {"anyOf": calls, "$defs": definitions}, "tools")


def _moved(schema: Any, place: str) -> Any:
    """A schema whose references point into itself, for a larger schema that holds it at `place`."""
    if isinstance(schema, list):
        return [_moved(one, place) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: f"{place}{one[1:]}" if key == "$ref" and isinstance(one, str) and one[:1] == "#" else _moved(one, place)
        for key, one in schema.items()
    }
