"""The operation of a server: rates, time limits, CORS, HTTPS, several models, newer checkpoints."""

import asyncio
import gc
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import nullcontext
from io import FileIO
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest

from quern.cli.options import ServeOptions
from quern.cli.verbs import parse
from quern.flags.recipe_flags import Arguments
from quern.generate.engine import Engine
from quern.generate.sampling import GREEDY
from quern.runs.run_dir import RunDir
from quern.serve.access import Keys
from quern.serve.gate import BURST, PACE, Gate, Pace
from quern.serve.metrics import append_to
from quern.serve.schema import ApiError
from quern.serve.server import LOOPBACK, Source, create_app, listen, open_app, prepare_process, serve
from quern.serve.worker import WAITING_ROWS, Models
from quern.text.chat import render_prompt
from quern.text.tokenizer import Tokenizer
from quern.train.manifest import CheckpointError
from tests.serve.conftest import CHAT, NO_END, post
from tests.support.http_server import running, web
from tests.support.load_clients import read_stream
from tests.support.rows import write_rows
from tests.support.toy_engine import CPU, Hooked, toy_engine, toy_tokenizer
from tests.support.waiting import until

HELLO: list[Any] = [{"role": "user", "content": "Hello?"}]


def slow_engine(seed: int = 0) -> Engine:
    return Hooked(toy_engine(context=256, seed=seed), lambda: time.sleep(0.02))


def ask(url: str, *, model: str = "toy", **more: Any) -> httpx.Response:
    headers = more.pop("headers", {})
    body = {"model": model, "messages": HELLO, "max_tokens": 5, "temperature": 0, "logit_bias": NO_END, **more}
    return post(url, CHAT, body, **headers)


# The program -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_the_main_thread_runs_the_engines_until_a_signal(number: signal.Signals) -> None:
    """Not another thread: OpenMP keeps threads for each that has computed, as the main one has, and too many wait."""
    threads = set()
    app = create_app({"toy": Hooked(toy_engine(context=256), lambda: threads.add(threading.current_thread()))})

    def client(url: str) -> int:
        try:
            return ask(url).status_code
        finally:
            os.kill(os.getpid(), number)

    ends = pytest.raises(KeyboardInterrupt) if number == signal.SIGINT else nullcontext()
    with listen("127.0.0.1", 0) as listener, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(client, f"http://127.0.0.1:{listener.getsockname()[1]}")
        with ends:
            serve(app, [listener])
    assert asked.result() == 200
    assert threads == {threading.main_thread()}


def test_an_error_of_the_thread_that_answers_ends_the_server() -> None:
    toy = toy_engine(context=256)
    with listen("127.0.0.1", 0) as listener, pytest.raises(OSError, match="Bad file descriptor"):
        listener.close()
        serve(create_app({"toy": toy}), [listener])


def test_an_engine_that_cannot_go_on_ends_the_server_with_its_error() -> None:
    """Such as by a panic of Rust, which is no Exception."""
    panic = type("Panic", (BaseException,), {})
    app = create_app({"toy": Hooked(toy_engine(context=256), Mock(side_effect=panic))})
    with listen("127.0.0.1", 0) as listener, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, f"http://127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(panic):
            serve(app, [listener])
    assert asked.result().status_code == 503


# Rates and times ---------------------------------------------------------------------------------------------


def test_a_client_gains_requests_as_time_passes() -> None:
    now = [100.0]
    rate, pace = Pace(6 / 60, 6 - 1, lambda: now[0]), Pace(PACE, BURST, lambda: now[0])
    assert [rate.wait("a", patient=False) for _ in range(8)] == [0.0] * 6 + [10.0] * 2, "what is refused does not count"
    assert [pace.wait("a") for _ in range(BURST + 3)] == pytest.approx([*[0.0] * (BURST + 1), 1 / PACE, 2 / PACE])
    assert pace.wait("b", 1 + 10) == 0, "nobody else is delayed"
    assert [pace.wait("b") for _ in range(BURST - 10)][-1] == pytest.approx(0) and pace.wait("b") > 0
    now[0] += 10
    assert [rate.wait("a", patient=False) for _ in range(2)] == pytest.approx([0, 10])
    now[0] = 1e6  # an hour of silence is worth a minute of requests
    assert [rate.wait("a", patient=False) for _ in range(7)] == pytest.approx([0] * 6 + [10])
    assert [pace.wait("a") for _ in range(BURST + 2)][-2:] == pytest.approx([0, 1 / PACE])


def test_rows_that_wait_are_counted_and_what_waits_is_answered_at_the_end() -> None:
    async def ask_it() -> None:
        worker = Models({"toy": toy_engine()}).find(None)
        worker.submit(pytest.fail, rows=WAITING_ROWS)
        with pytest.raises(ApiError, match="256 replies are waiting already") as busy:
            worker.submit(pytest.fail)
        call = asyncio.ensure_future(worker.call(pytest.fail))
        await asyncio.sleep(0)
        worker.stop()
        with pytest.raises(ApiError, match="the server is stopping") as stopped:
            await asyncio.wait_for(call, 5)
        assert (busy.value.status, stopped.value.status) == (429, 503)

    asyncio.run(ask_it())


def test_what_is_loaded_is_not_searched_for_garbage_and_a_replaced_model_is_freed() -> None:
    """Searching the whole heap stops all streams for some 0.2 s."""
    engine = toy_engine(context=256, prefix_megabytes=1)
    old = weakref.ref(engine)
    models = Models({"toy": engine})
    interval = sys.getswitchinterval()
    try:
        prepare_process()
        assert gc.get_freeze_count() > 0.9 * len(gc.get_objects(2)) and gc.get_freeze_count() > 10_000
        engine.generate([[0] * 20], max_tokens=1)
        del engine
        threading.Thread(target=models.run, daemon=True).start()
        models.metrics.hits.labels("toy").inc(9)
        asyncio.run(models.replace("toy", toy_engine(context=256, seed=1, prefix_megabytes=1)))
        hits = models.metrics.registry.get_sample_value("quern:prefix_cache_hits_total", {"model_name": "toy"})
        assert hits == 9, "counters go on with the next model"
        assert old() is None and gc.get_freeze_count() > 10_000
    finally:
        models.stop()
        gc.unfreeze()
        sys.setswitchinterval(interval)


def test_rates_over_http() -> None:
    refused = threading.Event()
    gate, held = Gate(LOOPBACK, per_minute=3, at_once=2), Hooked(toy_engine(context=256), lambda: refused.wait(60))
    with running(create_app({"toy": held}, gate)) as url:
        with ThreadPoolExecutor(3) as pool:
            asked = [pool.submit(ask, url) for _ in range(3)]
            (first,) = wait(asked, return_when=FIRST_COMPLETED).done
            refused.set()
        assert first.result().status_code == 429
        assert sorted(one.result().status_code for one in asked) == [200, 200, 429]
        answers = [ask(url) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [200, 429]
        assert answers[1].json()["error"]["code"] == "rate_limit_exceeded"
        assert 1 <= int(answers[1].headers["retry-after"]) <= 20
        assert web.get(f"{url}/v1/models").status_code == 200, "only replies count"


def test_a_request_that_takes_too_long_ends_with_an_error() -> None:
    with running(create_app({"toy": slow_engine()}, request_seconds=1)) as url:
        late = ask(url, max_tokens=200)
        assert late.status_code == 504 and late.json()["error"]["code"] == "timeout"
        text = ask(url, max_tokens=200, stream=True).text
        assert text.endswith("data: [DONE]\n\n") and "took longer than 1 s" in text
        assert ask(url, max_tokens=2).status_code == 200


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_told_once_and_ends_no_request(capfd: pytest.CaptureFixture[str]) -> None:
    lines = list[str]()
    with open("/dev/full", "ab", 0) as full:
        gate = Gate(LOOPBACK, log=append_to(full, lines.append))
        with running(create_app({"toy": toy_engine(context=256)}, gate)) as url:
            assert [ask(url).status_code for _ in range(3)] == [200] * 3
    assert lines == ["requests are missing in /dev/full (No space left on device): make room there"]
    assert "Traceback" not in capfd.readouterr().err


def test_a_torn_line_of_the_log_is_completed(tmp_path: Path) -> None:
    """With room for a part of a line, then for none, then for all."""

    class Disk(FileIO):
        room = [3, 0, 99, 99]

        def write(self, data: Any) -> int:
            if not (most := self.room.pop(0)):
                raise OSError(28, "No space left on device")
            return super().write(data[:most])

    lines, file = list[str](), tmp_path / "log"
    with Disk(file, "ab") as disk:
        append = append_to(disk, lines.append)
        for line in ("first", "lost", "third", "fourth"):
            append(line)
    assert file.read_text() == "first\nthird\nfourth\n" and len(lines) == 1


# Browsers and HTTPS --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [None, Keys({bytes(32): "ali"})], ids=["answers", "refusals"])
def test_pages_of_named_origins_alone_may_use_the_api(keys: Keys | None) -> None:
    gate = Gate(LOOPBACK, keys, origins=["https://good.example"])
    with running(create_app({"toy": toy_engine()}, gate)) as url:
        for origin, allowed in (("https://good.example", True), ("https://bad.example", False)):
            wish = {"origin": origin, "access-control-request-method": "POST"}
            wish["access-control-request-headers"] = "authorization,content-type"
            before = web.options(f"{url}/v1/chat/completions", headers=wish)
            assert (before.headers.get("access-control-allow-origin") == origin) is allowed
            answer = ask(url, headers={"origin": origin})
            assert answer.status_code == (401 if keys else 200)
            assert (answer.headers.get("access-control-allow-origin") == origin) is allowed
            assert "access-control-allow-credentials" not in answer.headers


# Several models, newer checkpoints ---------------------------------------------------------------------------


def test_several_models_answer_by_name() -> None:
    with running(create_app({"first": toy_engine(seed=0), "second": toy_engine(seed=1)})) as two:
        assert [model["id"] for model in web.get(f"{two}/v1/models").json()["data"]] == ["first", "second"]
        texts = [ask(two, model=name).json()["choices"][0]["message"]["content"] for name in ("first", "second")]
        assert texts[0] != texts[1]
        wrong = ask(two, model="third")
        assert wrong.status_code == 404 and "this server has 'first', 'second'" in wrong.json()["error"]["message"]
        counted = web.get(f"{two}/metrics").text
    for name in ("first", "second"):
        assert f'quern:generation_tokens_total{{model_name="{name}"}} 5.0' in counted


class Slowly(Tokenizer):
    """Takes long to read a prompt: a model is replaced meanwhile."""

    def encode(self, text: str) -> list[int]:
        time.sleep(0.02)
        return super().encode(text)


def test_new_requests_go_to_the_newer_model_and_open_streams_end_with_the_old() -> None:
    """Replaced three times under eight clients: no request fails, and each answer is one model's, whole."""
    engines = [slow_engine(seed) for seed in range(4)]
    for engine in engines:
        engine.tokenizer = Slowly(engine.tokenizer.merges, special_tokens=engine.tokenizer.special_tokens)
    prompt, how = render_prompt(toy_tokenizer(), HELLO), {"max_tokens": 25, "sampling": GREEDY, "bias": NO_END}
    said = [toy_engine(context=256, seed=seed).generate([prompt], **how)[0][0].text for seed in range(4)]
    assert len(set(said)) == 4
    replaced, answers = threading.Event(), []

    async def watch(models: Models) -> None:
        for engine in engines[1:]:
            await models.replace("toy", engine)
        replaced.set()

    def client(url: str) -> None:
        while True:
            last = replaced.is_set()
            answer = read_stream(ask(url, max_tokens=25, stream=True).content)
            assert answer.ended and answer.reason == "length"
            answers.append(answer.text)
            if last:
                return

    with running(create_app({"toy": engines[0]}, watch=watch)) as url, ThreadPoolExecutor(8) as pool:
        list(pool.map(client, [url] * 8))
        assert ask(url, max_tokens=25).json()["choices"][0]["message"]["content"] == said[3]
    assert set(answers) <= set(said) and said[3] in answers


class Changing(Source):
    """A run whose newest checkpoint is another one at each look, until the last."""

    looks: list[Any]
    failures: list[None]

    def newest(self) -> tuple[str, int, int]:
        look = self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
        if isinstance(look, OSError):
            raise look
        return "pretrain" if look == 1 else "sft", look, 0

    def open(self, log: Any) -> tuple[Engine, str]:
        self.failures.append(None)
        if len(self.failures) < 4:
            log("step 2 is damaged")
            raise CheckpointError("none is good")
        return toy_engine(context=256, seed=self.looks[0]), f"step {self.looks[0]}"


class Still(Source):
    """A run that has one step."""

    def newest(self) -> tuple[str, int, int]:
        return self.stage or "", 1, 0

    def open(self, log: Any) -> tuple[Engine, str]:
        return toy_engine(context=256), "a step"


def test_the_server_looks_for_newer_checkpoints_also_after_a_look_or_an_opening_that_failed(tmp_path: Path) -> None:
    """And where the samples of another model are damaged, which has no suggestions then."""
    source, lines = Changing(RunDir(tmp_path, "toy"), None, CPU, 0), list[str]()
    other = Still(RunDir(tmp_path, "other"), "sft", CPU, 0)
    write_rows(other.run_dir.folder / "samples.jsonl", [{"stage": "sft", "messages": ["Who?"]}])
    Changing.looks, Changing.failures = [1, 1, OSError("the disk is gone"), 2], [None] * 4
    app = open_app({"other": other, "toy": source}, Gate(LOOPBACK), 600, lines.append, "", 0.05)
    assert app.state.welcome.completes == ["toy"], "a base model"
    write_rows(source.run_dir.folder / "samples.jsonl", [{"stage": "sft", "prompt": "Who?"}])
    Changing.failures = []
    with running(app) as url:
        until(lambda: "toy: new requests go to step 2" in lines, 5)
        until(lambda: web.get(f"{url}/welcome").json()["completes"] == [], 5)
        assert web.get(f"{url}/welcome").json()["suggestions"] == {"other": [], "toy": ["Who?"]}
    refused = r"warning: other has no suggestions: .*samples\.jsonl, line 1, is not a record .*: remove that line"
    assert [bool(re.fullmatch(refused, line)) for line in lines if "suggestions" in line] == [True], "told once"
    assert any("the disk is gone" in line for line in lines)
    assert lines.count("step 2 is damaged") == 1 and sum("none is good" in line for line in lines) == 1, "told once"


def test_a_signal_does_not_wait_for_the_opening_of_a_newer_checkpoint(tmp_path: Path) -> None:
    class Endless(Changing):
        def open(self, log: Any) -> tuple[Engine, str]:
            if self.looks[0] == 2:
                killed.append(time.monotonic())
                os.kill(os.getpid(), signal.SIGTERM)
                ended.wait(5)
            return toy_engine(context=256), "a step"

    killed, ended = list[float](), threading.Event()
    Changing.looks = [1, 1, 2]
    app = open_app({"toy": Endless(RunDir(tmp_path, "toy"), None, CPU, 0)}, Gate(LOOPBACK), 600, print, "", 0.05)
    with listen("127.0.0.1", 0) as listener:
        serve(app, [listener])
    ended.set()
    assert time.monotonic() - killed[0] < 2


def test_a_checkpoint_that_is_repaired_in_its_place_is_another_one(tmp_path: Path) -> None:
    run = RunDir(tmp_path, "toy")
    source, folder = Source(run, None, CPU, 0), run.checkpoints("sft") / "step-00000100"
    assert source.newest() is None
    folder.mkdir(parents=True)
    (folder / "weights").write_text("damaged")
    before = source.newest()
    assert before is not None and before[:2] == ("sft", 100) and source.newest() == before
    time.sleep(0.02)  # more than a tick of the file system's clock
    (folder / "weights").write_text("as it was")
    assert source.newest() != before


def test_each_model_has_the_suggestions_of_its_own_run_and_stage(tmp_path: Path) -> None:
    run, stages = RunDir(tmp_path, "toy"), ("sft", "pretrain", "rl")
    write_rows(run.folder / "samples.jsonl", [{"stage": stage, "prompt": f"of {stage}"} for stage in stages[:2]])
    app = open_app({one: Still(run, one, CPU, 0) for one in stages}, Gate(LOOPBACK), 600, print, "", 0)
    assert app.state.welcome.suggestions == {"sft": ("of sft",), "pretrain": ("of pretrain",), "rl": ()}


def test_the_container_copies_what_exists_and_starts_with_flags_that_exist() -> None:
    root = Path(__file__).parents[2]
    lines = (root / "Dockerfile").read_text(encoding="utf-8").splitlines()
    copied = [name for line in lines if line.startswith("COPY") for name in line.split()[1:-1]]
    assert copied and all((root / name).exists() for name in copied)
    entry, default = (json.loads(line.split(maxsplit=1)[1]) for line in lines if line.startswith(("ENTRYPOINT", "CMD")))
    assert entry[:2] == ["quern", "serve"]
    options, _ = parse("serve", Arguments((*entry[2:], *default)), ServeOptions)
    assert options.host == "0.0.0.0" and options.where.out == Path("/data")


@pytest.mark.parametrize(("examples", "passed"), [(5, 20), pytest.param(850, 5000, marks=pytest.mark.campaign)])
def test_no_request_of_the_published_schema_is_a_server_error(tmp_path: Path, examples: int, passed: int) -> None:
    """Schemathesis makes requests up from the schema."""
    schemathesis = Path(sys.executable).with_name("schemathesis")
    options = f"--checks not_a_server_error --phases fuzzing --seed 1 --max-examples {examples}"
    with running(create_app({"toy": toy_engine(context=256)})) as url:
        done = subprocess.run(
            [schemathesis, "run", f"{url}/openapi.json", *options.split()],
            cwd=tmp_path,  # it keeps a cache in its working folder
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]
        assert web.get(f"{url}/health").status_code == 200
        assert "generation_tokens_total" in web.get(f"{url}/metrics").text
    summary = re.sub(r"\s+", " ", done.stdout[done.stdout.index("Test cases:") :])
    assert int(re.findall(r"([\d,]+) passed", summary)[-1].replace(",", "")) >= passed
