"""The server as OpenAI's own client and a plain HTTP client see it: a real one, with a small random model."""

import hashlib
import itertools
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace as Steps
from typing import Any, cast
from unittest.mock import Mock

import httpx
import openai
import pytest
from torch import nn

from quern.cli.verbs import verb_serve, with_run
from quern.flags.recipe_flags import Arguments
from quern.generate.engine import Engine
from quern.generate.grammar import Grammars
from quern.generate.reply import Completion, Delta
from quern.generate.sampling import Sampling
from quern.serve import access
from quern.serve.access import Hosts, Keys, KeysFile, keys_command
from quern.serve.answers import Chat, Choice
from quern.serve.gate import Gate
from quern.serve.schema import ChatRequest, parse_request
from quern.serve.server import LOOPBACK, create_app, listen
from quern.terminal import silent
from quern.text.chat import render_prompt
from quern.text.tokenizer import Tokenizer
from tests.browser.parrot import make_parrot
from tests.serve.conftest import CHAT, CONTEXT, HELLO, NAME, NO_END, check_error, post, said
from tests.support.http_server import counters, running, web
from tests.support.load_clients import post as wire
from tests.support.toy_engine import Hooked, toy_engine
from tests.support.waiting import until


def ask(**more: Any) -> dict[str, Any]:
    """A request, with parameters that ask for nothing."""
    nothing = {"user": "me", "logit_bias": {}, "presence_penalty": 0, "stop": None}
    return {"model": NAME, "messages": HELLO, "seed": 5, "max_tokens": 20, **nothing, **more}


def test_models_and_health(client: openai.OpenAI, url: str) -> None:
    assert web.get(f"{url}/health").json() == {"status": "ok"}
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).owned_by == "quern"
    with pytest.raises(openai.NotFoundError, match="does not exist; this server has 'toy'"):
        client.models.retrieve("gpt-4")


def test_every_field_of_sampling_reaches_the_engine(client: openai.OpenAI, engine: Engine) -> None:
    own, prompt = toy_engine(context=CONTEXT), render_prompt(engine.tokenizer, HELLO)
    cases: list[dict[str, Any]] = [{"temperature": 2.0, "top_k": 3}, {"temperature": 2.0, "top_p": 0.2}, {"min_p": 0.8}]
    for given in cases:
        [[expected]] = own.generate([prompt], max_tokens=20, seed=5, sampling=Sampling(**given))
        [[plain]] = own.generate([prompt], max_tokens=20, seed=5)
        answer = client.chat.completions.create(
            model=NAME, messages=HELLO, seed=5, max_completion_tokens=20, extra_body={"top_p": None, **given}
        )
        assert answer.choices[0].message.content == expected.text != plain.text
        assert answer.choices[0].finish_reason == expected.finish_reason and answer.id.startswith("chatcmpl-")
        assert answer.usage is not None and answer.usage.total_tokens == len(prompt) + len(expected.ids)
    everything = {f.name: getattr(Sampling(), f.name) for f in fields(Sampling)}
    assert parse_request(ChatRequest, {"model": NAME, "messages": HELLO, **everything}).sampling == Sampling()


def test_a_stream_has_its_first_piece_at_once_and_the_others_together(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pieces(seconds: float) -> list[str]:
        monkeypatch.setattr("quern.serve.worker.STREAM_SECONDS", seconds)
        chunks = client.chat.completions.create(**ask(stream=True, logit_bias=NO_END))
        return [text for chunk in chunks for choice in chunk.choices if (text := choice.delta.content)]

    every, few = pieces(0.0), pieces(60.0)
    assert "".join(every) == "".join(few) and few[0] == every[0]
    assert len(few) < 4 < len(every)


def test_answers_without_a_seed_differ(client: openai.OpenAI) -> None:
    answers = [client.chat.completions.create(model=NAME, messages=HELLO, max_tokens=12) for _ in range(6)]
    assert len({answer.choices[0].message.content for answer in answers}) > 1
    equal = client.completions.create(model=NAME, prompt=["At"] * 6, max_tokens=12)
    assert len({choice.text for choice in equal.choices}) > 1


def test_calls_of_the_calculator_travel_as_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quern.serve.worker.STREAM_SECONDS", 0.0)  # the call comes in two pieces
    parrot = make_parrot()
    parrot.will_say(Delta("tool", "1"), Delta("tool", "+1"), Delta("output", "2"), "two", seconds=0.1)
    with running(create_app({NAME: parrot})) as base:
        message = post(base, CHAT, ask()).json()["choices"][0]["message"]
        assert (message["role"], message["content"]) == ("assistant", "two")
        kinds = {"tool": "1+1", "output": "2", "text": "two"}
        assert message["parts"] == [{"type": kind, "text": text} for kind, text in kinds.items()]
        answer = post(base, CHAT, ask(stream=True))
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.text.split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""] and "usage" not in lines[0]
        deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in lines[1:-2]]
        numbered = [(0, "tool", "1"), (0, "tool", "+1"), (1, "output", "2")]
        assert deltas[:3] == [{"parts": [{"index": at, "type": kind, "text": text}]} for at, kind, text in numbered]
        assert "".join(delta.get("content", "") for delta in deltas[3:]) == "two"
        # OpenAI's client joins the deltas to a message; sent back like the whole one, it is read alike.
        with openai.OpenAI(base_url=f"{base}/v1", api_key="none").chat.completions.stream(**ask()) as stream:
            joined = stream.get_final_completion().choices[0].message.model_dump(exclude_none=True)
        assert joined["content"] == "two" and [part["text"] for part in joined["parts"]] == ["1+1", "2"]
        read = [post(base, "/tokenize", {"messages": [*HELLO, one]}).json()["tokens"] for one in (message, joined)]
        assert read[0] == read[1]
        follow_up = [*HELLO, message, {"role": "user", "content": "and?"}]
        assert post(base, CHAT, ask(messages=follow_up)).status_code == 200


def test_the_arguments_of_a_call_are_those_that_the_model_wrote() -> None:
    arguments = '{"n":1e999,"m":0.10000000000000000001,"o":{"arguments":"}"}}'
    part: Any = {"type": "tool", "text": f'{{"name":"f","arguments":{arguments}}}'}
    choice = Choice(calls=True)
    choice.take(Completion([1], "", "tool_calls", [part], 1))
    assert [call["function"] for call in choice.called] == [{"name": "f", "arguments": arguments}]


def test_what_takes_long_runs_between_two_steps_of_the_engine(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large body is decoded, and log-probabilities are written, in the thread that runs the engine."""
    threads, told = list[str](), Chat.told

    def note() -> None:
        threads.append(threading.current_thread().name)

    monkeypatch.setattr("quern.serve.routes.parse_request", lambda *given: note() or parse_request(*given))
    monkeypatch.setattr(Chat, "told", lambda *given: note() or told(*given))
    assert post(url, CHAT, b'{"x":[' + b"{}," * 2000 + b"{}]}").json()["error"]["param"] == "model"
    assert post(url, CHAT, ask(logprobs=True, n=2)).status_code == 200
    assert threads[:1] + threads[-2:] == ["quern-engines"] * 3 and len(threads) == 4


@pytest.mark.parametrize(
    ("path", "fields", "owner", "name", "status"),
    [
        (CHAT, {"structured_outputs": {"regex": "a"}}, Grammars, "regex", 200),
        (CHAT, {"messages": [said("user", "a" * 70_000)]}, Tokenizer, "encode", 400),
        ("/tokenize", {"prompt": "a" * 70_000}, Tokenizer, "encode", 200),
    ],
    ids=["a form", "a long message", "a long text"],
)
def test_nobody_waits_for(
    url: str, monkeypatch: pytest.MonkeyPatch, path: str, fields: dict[str, Any], owner: Any, name: str, status: int
) -> None:
    begun, answered, method = threading.Event(), threading.Event(), getattr(owner, name)

    def slow(self: Any, text: str) -> Any:
        if owner is Grammars or len(text) > 60_000:
            begun.set()
            answered.wait(20)
        return method(self, text)

    monkeypatch.setattr(owner, name, slow)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(post, url, path, fields)
        assert begun.wait(20)
        assert post(url, CHAT, ask()).status_code == 200 and not waits.done()
        answered.set()
        assert waits.result().status_code == status


def test_no_access_from_other_origins_or_by_other_names(url: str) -> None:
    response = web.options(f"{url}/v1/models", headers={"origin": "http://evil.example"})
    assert not [name for name in response.headers if name.startswith("access-control")]
    check_error(web.get(f"{url}/v1/models", headers={"host": "evil.example:80"}), 403, "for 'evil.example':")
    check_error(web.get(f"{url}/v1/models", headers={"host": ""}), 403, "without a Host header")
    assert web.get(f"{url}/v1/models", headers={"host": "localhost:8000"}).status_code == 200


def test_keys_guard_the_api_and_the_log_has_no_text(engine: Engine, tmp_path: Path) -> None:
    file, lines = tmp_path / "keys.txt", []
    digest = hashlib.sha256(b"open sesame").hexdigest()
    file.write_text(f"# who may ask\n{digest} ali   # until spring\n")
    app = create_app({NAME: engine}, Gate(LOOPBACK, KeysFile(file, print), lines.append))
    good = {"authorization": "Bearer open sesame"}
    bad = ("", "Bearer sesame", f"Bearer {digest}", "Basic open sesame", "x")
    with running(app) as base:
        for wrong in [{"authorization": text} for text in bad]:
            for path in ("/v1/models", "/metrics", "/v1/nothing", "/openapi.json", "/welcome", "//health"):
                check_error(web.get(base + path, headers=wrong), 401, "Authorization: Bearer KEY")
            check_error(post(base, CHAT, ask(), **wrong), 401, "API key")
        with openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError):
                client.models.list()
            assert [model.id for model in client.with_options(api_key="open sesame").models.list()] == [NAME]
        assert post(base, CHAT, ask(), **good).status_code == 200
        assert web.get(f"{base}/health").status_code == web.get(base).status_code == 200
    found = [json.loads(line) for line in lines]
    [answered] = [line for line in found if line["path"] == "/v1/chat/completions" and line["status"] == 200]
    assert answered["key"] == "ali" and answered["method"] == "POST" and answered["seconds"] > 0
    assert {line["key"] for line in found if line["status"] == 401} == {None}
    assert "Gr" not in "".join(lines) and "sesame" not in "".join(lines)


def test_keys_are_added_shown_once_and_removed(tmp_path: Path) -> None:
    file, lines = tmp_path / "out" / "keys.txt", list[str]()

    def keys(*arguments: str) -> list[str]:
        lines.clear()
        words = with_run("serve", Arguments(("keys", *arguments, "--keys", str(file))))
        assert verb_serve("serve", words) == 0
        return [*lines]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quern.cli.verbs.log", lines.append)
        key = keys("add", "ali")[0].split()[-1]
        server = KeysFile(file, lines.append)
        other = keys("add", "ben")[0].split()[-1]
        assert [server.holder(f"Bearer {one}") for one in (key, other, "x")] == ["ali", "ben", None]
        assert key not in file.read_text()
        assert keys("list") == ["ali", "ben"]
        for wrong in (["add", "ali"], ["add", "two words"], ["remove", "cy"], ["add"], ["lst"], []):
            with pytest.raises(ValueError, match=r"keys (add|remove|list|takes)"):
                keys(*wrong)
        file.symlink_to(kept := file.rename(file.with_name("kept")))
        with pytest.raises(ValueError, match=r"`quern serve keys remove ali --keys /.*/keys\.txt`"):
            keys("add", "ali")
        keys("remove", "ali")
        assert file.is_symlink() and "ali" not in kept.read_text()
        assert server.holder(f"Bearer {key}") is None and keys("list") == ["ben"]
        lines.clear()
        file.rename(file.with_name("away"))
        assert [server.holder(f"Bearer {one}") for one in (key, other)] == [None, "ben"]
        assert len(lines) == 1 and "cannot be read" in lines[0] and lines[0].endswith("the keys from before are good")
        file.with_name("away").rename(file)
        keys("remove", "ben")
        assert server.holder(f"Bearer {other}") is None and "quern serve keys add" in keys("list")[0]


def test_keys_that_are_added_at_once_are_all_kept(tmp_path: Path) -> None:
    file, names = tmp_path / "keys.txt", [f"holder{number}" for number in range(16)]
    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(lambda name: keys_command(["add", name, "--keys", str(file)], silent), names))
    assert sorted(line.split()[1] for line in file.read_text().splitlines()) == sorted(names)


def test_the_link_for_a_phone_opens_the_server(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "lan_address", lambda: "127.0.0.1")
    keys, invite = access.admit_lan(None)
    with running(create_app({NAME: engine}, Gate(Hosts("0.0.0.0"), keys))) as url:
        link, *drawn = invite("http", int(url.rpartition(":")[2])).splitlines()[1:]
        base, key = link.split("/#key=")
        assert base == url and web.get(base).status_code == web.head(base).status_code == 200
        assert web.get(f"{base}/docs").status_code == 200
        models = [web.get(f"{base}/v1/models", headers={"authorization": f"Bearer {one}"}) for one in (key, "x")]
        assert [answer.status_code for answer in models] == [200, 401]
    assert len(drawn) > 15 and "█" in drawn[0]
    mine = Keys({bytes(32): "ali"})
    assert access.admit_lan(mine)[0] is mine and "key=" not in access.admit_lan(mine)[1]("https", 8000)


@pytest.mark.parametrize("text", ["", "# nobody\n", "abc ali\n", f"{'0' * 64}\n", f"{'0' * 64} ali baba\n"])
def test_a_file_without_good_keys_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "keys.txt").write_text(text)
    with pytest.raises(ValueError, match=r"keys.txt.*(SHA-256 hash of a key|keys add NAME)"):
        KeysFile(tmp_path / "keys.txt", print)


@pytest.mark.parametrize(
    ("bound", "header", "accepted"),
    [
        ("127.0.0.2", "evil.com", False),
        ("127.0.0.2", "127.0.0.2:8000", True),
        ("0.0.0.0", "evil.com:8000", False),  # a container whose port is published on loopback
        ("0.0.0.0", "192.168.1.7:8000", True),
        ("0.0.0.0", "localhost:8000", True),
        ("::", "[fe80::1%eth0]:8000", True),
        ("::", "[::1]", True),
        ("::", "LOCALHOST", True),
        ("::", f"{socket.gethostname()}:8000", True),
        ("chat.example.org", "chat.example.org", True),
        ("chat.example.org", "example.org", False),
        ("127.0.0.1", "a.named.org", True),
        ("127.0.0.1", "named.org", False),
        ("127.0.0.1", "evilnamed.org", False),
        ("127.0.0.1", "127.0.0.1.evil.com", False),
        ("127.0.0.1", "quern.localhost", True),
        ("127.0.0.1", "", False),
    ],
)
def test_hosts_are_derived_from_what_was_bound_and_named(bound: str, header: str, accepted: bool) -> None:
    assert (header in Hosts(bound, ["*.named.org"])) is accepted
    assert header == "" or header in Hosts(bound, ["*"])


def test_an_address_that_cannot_be_had_names_the_flag() -> None:
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        port = listener.getsockname()[1]
        with pytest.raises(OSError, match=f"127.0.0.1:{port} .*in use.*--port"):
            listen("127.0.0.1", port)
    with pytest.raises(OSError, match="192.0.2.1:0 .*--host"):  # no machine's own (RFC 5737)
        listen("192.0.2.1", 0)
    with pytest.raises(OSError, match=r"cannot serve at \[2001:db8::1\]:0 "):  # nor this (RFC 3849)
        listen("2001:db8::1", 0)
    with pytest.raises(OSError, match=r"a\.\.b:0 .no such host or port.*--host"):
        listen("a..b", 0)


@pytest.fixture
def slow(engine: Engine) -> Iterator[Steps]:
    """The count of the model's decode steps, and the seconds that each takes: enough to be interrupted."""
    steps = Steps(count=0, seconds=0.02)

    def step(*_: Any) -> None:
        steps.count += 1
        time.sleep(steps.seconds)

    handle = cast(nn.Module, engine.model).register_forward_hook(step)
    yield steps
    handle.remove()


def test_a_client_that_leaves_stops_the_generation(url: str, slow: Steps) -> None:
    """Also one that waits for the whole reply. tests/serve/test_load.py has streams that are given up."""
    body = json.dumps(ask(max_tokens=200, logit_bias={}, temperature=0)).encode()
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as connection:
        connection.sendall(wire(CHAT, body))
        until(lambda: slow.count > 3)
    seen = 0
    while seen < slow.count:  # it does not go on for a client that has left
        seen = slow.count
        time.sleep(0.3)
    assert slow.count < 150
    until(lambda: 'num_requests_running{model_name="toy"} 0.0' in web.get(f"{url}/metrics").text)


def test_requests_share_the_batch(url: str, slow: Steps) -> None:
    """Eight answers take hardly more steps than one, and each is what it is alone; the event loop stays free."""
    bodies = [ask(seed=seed, max_tokens=30, logit_bias=NO_END) for seed in range(8)]
    seconds, slow.seconds = slow.seconds, 0.0
    alone = [post(url, CHAT, body).json()["choices"] for body in bodies]
    slow.seconds, slow.count = seconds, 0
    with ThreadPoolExecutor(8) as pool:
        found = pool.map(lambda body: post(url, CHAT, body).json()["choices"], bodies)
        until(lambda: slow.count > 1)
        start = time.monotonic()
        assert web.get(f"{url}/health").status_code == 200 and time.monotonic() - start < 2
    assert [*found] == alone
    assert slow.count < 60, f"{slow.count} steps of the model for eight replies of 30 tokens"


def test_too_many_waiting_are_told_to_come_back(engine: Engine, slow: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quern.serve.worker.WAITING_ROWS", 1)
    narrow = Engine(engine.model, engine.tokenizer, engine.machine, max_rows=1)
    with running(create_app({NAME: narrow})) as base:
        slow.seconds = 0.1
        with ThreadPoolExecutor(5) as pool:
            results = [*pool.map(lambda _: post(base, CHAT, ask(max_tokens=10, temperature=0)), range(5))]
    refused = [response for response in results if response.status_code != 200]
    assert refused and len(refused) < 5
    for response in refused:
        check_error(response, 429, "busy")
        assert response.headers["retry-after"] == "1"


def test_a_failing_engine_ends_a_stream_with_an_error_and_done(
    engine: Engine, capfd: pytest.CaptureFixture[str]
) -> None:
    fail = Mock(side_effect=itertools.cycle([None, None, RuntimeError("secret detail")]))  # in the middle of a reply
    with running(create_app({NAME: Hooked(engine, fail)})) as base:
        text = post(base, CHAT, ask(stream=True)).text
        blocks = text.split("\n\n")
        assert blocks[-2] == "data: [DONE]" and "error" in json.loads(blocks[-3][6:])
        assert "secret" not in text
        check_error(post(base, CHAT, ask()), 500, "failed on this request")
        with openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0) as client:
            with pytest.raises(openai.APIError, match="failed on this request"):
                list(client.chat.completions.create(model=NAME, messages=HELLO, stream=True, seed=5))
            *_, last = client.responses.create(model=NAME, input="Hello?", temperature=0, stream=True)
        assert last.type == "response.failed" and last.response.status == "failed" and last.response.error
        assert last.response.error.message == "The server failed on this request."
        assert counters(base)["request_success_total error"] == 4
        assert capfd.readouterr().err.count("RuntimeError: secret detail") == 4, "each is logged once"
        assert web.get(f"{base}/health").status_code == 200


def test_stopping_the_server_ends_what_is_running(engine: Engine, slow: Steps) -> None:
    slow.seconds = 0.05
    threads_before = threading.active_count()
    with ThreadPoolExecutor(1) as pool, running(create_app({NAME: engine})) as base:
        asked = pool.submit(post, base, CHAT, ask(max_tokens=200, temperature=0))
        until(lambda: slow.count > 2)
    assert isinstance(asked.exception(20), httpx.HTTPError | None)
    until(lambda: threading.active_count() <= threads_before)
