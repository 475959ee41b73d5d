"""The options of the verbs that take a recipe or open a run, as dataclasses.

Verbs with options of their own define them in the file of their stage.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from ipaddress import ip_network
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from annotated_types import Interval

from quern.cluster import cluster_cpus, connect
from quern.field_types import Amount, Count, Few, Port, Seed
from quern.flags.check_flags import DeviceOptions, Mark, Spelled
from quern.flags.recipe_flags import ALL, FINE_TUNING, FOLLOWING, QUESTIONS, RL, WORKERS, Refusal, own
from quern.generate.sampling import CHAT, Sampling
from quern.recipe import FOR_FINE_TUNING, FOR_RL, IN_FINE_TUNING, Recipe
from quern.runs.run_dir import NEWEST, RunDir

if TYPE_CHECKING:
    from quern.machine import Machine
    from quern.stages.encode import StartWorkers

_OTHER_VERB = "does nothing in `quern {verb}`: give it to the verb that trains"
_OF_THE_RUN = "belongs to the run's recipe and cannot change: leave it out"
_TUNING = (*FOLLOWING, WORKERS, QUESTIONS, *own("steps", "warmdown_share"))


def log(line: str) -> None:
    print(line, flush=True)


@dataclass
class ReportOptions:
    """Flags of `quern report`: which run."""

    out: Path = Path("out")
    """The output folder; all files of a run are below it."""
    run: str = "first"
    """The run's name."""

    @property
    def run_dir(self) -> RunDir:
        return RunDir(self.out, self.run)


@dataclass
class RunOptions(DeviceOptions, ReportOptions):
    """The run, and the device that computes."""

    def machine(self, threads: int | None = None, *, log: Callable[[str], None]) -> Machine:
        from quern.kernels.attention.autotune import select_attention

        machine = select_attention(self.detect(threads))
        for note in machine.notes:
            log(note)
        return machine


@dataclass
class TokenizerOptions:
    """Flags of `quern tokenizer`."""

    refusals: ClassVar = (
        *FOLLOWING,
        Refusal("text.tinyworld_conversations", _OTHER_VERB),
        Refusal(ALL, _OTHER_VERB, but="depth data include exclude val shards seed text"),
        Refusal("to dir engine ray", "is for `quern prepare`"),
        WORKERS,
        Refusal("text.tokenizer", "names a tokenizer, and `quern tokenizer` trains one: leave it out"),
    )

    recipe: Annotated[Recipe, Mark.FLAT]
    out: Path = Path("out")
    """The output folder."""


@dataclass
class EncodingOptions:
    """A verb that turns text into tokens."""

    workers: Annotated[Few | None, Mark.RARE] = None
    """Processes that turn text into tokens. Default: one per CPU thread, at most 16."""


@dataclass
class PrepareOptions(EncodingOptions, TokenizerOptions):
    """Flags of `quern prepare`."""

    refusals: ClassVar = TokenizerOptions.refusals[:-3]

    engine: Literal["processes", "ray"] = "processes"
    """Where the workers run: in processes of this machine, or on a Ray cluster, by default one per CPU, at most 16."""
    ray: str | None = None
    """With --engine ray: the cluster, auto or HOST:PORT. Default: auto."""
    to: Literal["bin", "nanogpt"] | None = None
    """Also write the tokens for other programs: bin for modded-nanogpt and llm.c, nanogpt for nanoGPT. Default: only
    quern's own shards, under --out."""
    dir: Path | None = None
    """With --to: the folder to write. Default: none."""

    def __post_init__(self) -> None:
        if (self.to is None) != (self.dir is None):
            raise ValueError("--to and --dir belong together: give the format and the folder, --to bin --dir FOLDER")
        if self.ray is not None and self.engine != "ray":
            raise ValueError("--ray names a cluster: give --engine ray with it, or leave it out")

    def encoders(self) -> tuple[int, StartWorkers]:
        """The number of workers, and where they run. Connects to the cluster."""
        from torch import get_num_threads

        from quern.stages.encode import ENOUGH_WORKERS, on_cluster, on_processes

        start_workers, count = on_processes, get_num_threads
        if self.engine == "ray":
            connect(self.ray or "auto")
            start_workers, count = on_cluster, cluster_cpus
        return self.workers or min(ENOUGH_WORKERS, count()), start_workers


@dataclass
class RanksOptions:
    """A verb that trains what the recipe describes: its processes, and where its metrics go."""

    refusals: ClassVar = (RL, *FOLLOWING)

    recipe: Annotated[Recipe, Mark.FLAT]
    where: Annotated[RunOptions, Mark.FLAT] = field(default_factory=RunOptions)
    resume: bool = False
    """Continue from the newest good checkpoint, with the run's recipe and text, or begin. `run` needs no flag."""
    ranks: Few = 1
    """Processes on this machine that train together."""
    nodes: Annotated[Few, Mark.RARE] = 1
    """Machines that run this command together, with the same number of ranks each."""
    rendezvous: Annotated[str, Mark.RARE] = ""
    """With several nodes: host:port, a free port of one of the nodes."""
    tp: Annotated[Few, Mark.RARE] = 1
    """Ranks that share one replica of the model (tensor parallelism); the replicas are data parallel."""
    zero: Annotated[Literal[2, 3], Mark.RARE] = 2
    """2: the replicas share the optimizer's state; 3: also parameters and gradients, which are gathered block by block,
    with less memory and more communication."""
    restarts: Annotated[int, Interval(ge=0, le=10**6), Mark.RARE] = 3
    """With several ranks: how often all ranks restart after one fails."""
    timeout: Annotated[Amount, Mark.RARE] = 60.0
    """With several ranks: seconds without progress in a training step until all ranks restart."""
    track: Annotated[tuple[Literal["tensorboard", "wandb"], ...], Mark.RARE] = ()
    """Also send metrics to these."""

    def __post_init__(self) -> None:
        if self.nodes > 1 and ":" not in self.rendezvous:
            raise ValueError(f"--nodes {self.nodes} needs --rendezvous host:port, the same on every node")
        if self.nodes == 1 and self.rendezvous:
            raise ValueError("--rendezvous is where several nodes meet: give --nodes, too, or leave it out")


@dataclass
class RunAllOptions(EncodingOptions, RanksOptions):
    """Flags of `quern run`."""

    questions: Annotated[Few, Mark.RARE] = 200
    """The most held-out questions of each kind in the evaluation."""
    chat: bool = False
    """Also fine-tune a model of your own text, by default on the built-in conversations."""
    sft: bool = True
    """--no-sft skips fine-tuning and leaves a base model."""
    program: Annotated[Literal["ollama", "llama.cpp", "transformers"] | None, Spelled("for")] = None
    """Export the trained model for this program, into the run's folder. ollama and llama.cpp read models of the recipe
    llama with one digit in a token alone: --for makes both the default. Default: no export."""


@dataclass
class TrainOptions(RanksOptions):
    """Flags of `quern pretrain`, `quern sft` and `quern rl`."""

    start: Annotated[str | None, Spelled("from")] = None
    """Start a new run (--run) with the model of this run. With --resume: only if the new run has no checkpoint yet.
    Default: random weights, the run's base model, or for `quern rl` its fine-tuned model."""
    from_step: str = NEWEST
    """The checkpoint for --from: newest, before-warmdown (saved before the learning rates fell), or a step."""


@dataclass
class PretrainOptions(EncodingOptions, TrainOptions):
    """Flags of `quern pretrain`."""

    refusals: ClassVar = (
        RL,
        *FOLLOWING,
        Refusal(FINE_TUNING, "is for fine-tuning: give it to `quern sft` or `quern run`"),
        QUESTIONS,
    )


@dataclass
class SftOptions(TrainOptions):
    """Flags of `quern sft`."""

    refusals: ClassVar = (
        RL,
        *_TUNING,
        *own("batch_tokens"),
        Refusal(
            ALL,
            "is decided by the base run, whose model, text and seed `quern sft` takes over: leave it out, or pretrain "
            "another run with it (`quern pretrain --run NAME`) and fine-tune that one",
            but=" ".join((*FOR_FINE_TUNING, *IN_FINE_TUNING)),
        ),
    )


@dataclass
class RlOptions(TrainOptions):
    """Flags of `quern rl`."""

    refusals: ClassVar = (
        *_TUNING,
        Refusal(
            ALL,
            "is decided by the run, whose model, text and seed `quern rl` takes over: leave it out",
            but=" ".join((*FOR_RL, *IN_FINE_TUNING)),
        ),
    )


TRAINING = {"pretrain": PretrainOptions, "sft": SftOptions, "rl": RlOptions}
"""The flags of the verbs that train one stage."""


@dataclass
class _ModelOptions:
    """A verb that uses the model of a run; its recipe is the run's."""

    refusals: ClassVar = (WORKERS, Refusal(ALL, _OF_THE_RUN))

    recipe: Annotated[Recipe, Mark.HIDDEN]
    where: Annotated[RunOptions, Mark.FLAT] = field(default_factory=RunOptions)


@dataclass
class EvaluateOptions(_ModelOptions):
    """Flags of `quern evaluate`."""

    questions: Few = 200
    """The most held-out questions of each kind."""
    tasks: tuple[str, ...] = ()
    """Built-in tasks by name, task files (.py), core and core/TASK, or chat and chat/TASK. Default: the built-in tasks
    that suit the run's data. The base model answers questions only with --tasks or --stage pretrain."""
    bundle: Path | None = None
    """The folder with the files of CORE's tasks (.jsonl, .jsonl.gz), for --tasks core. Default: core, the public
    bundle, which is downloaded."""
    limit: Annotated[int, Interval(ge=1, le=10**7)] | None = None
    """The most questions of each task of CORE, of the chat tasks and of --harness. Default: all."""
    chat_data: Path | None = None
    """The folder with the files of ARC, MMLU, GSM8K and HumanEval, for --tasks chat. Default: they are downloaded."""
    samples: Few = 1
    """Programs for each problem of HumanEval: above 1, pass@k is estimated from so many at temperature 0.8."""
    contamination: bool = False
    """Also compute the share of each task's questions that have 13 words in a row in common with the training text,
    which is read once for it."""
    check: bool = False
    """Ask nothing; check that the tasks that are named can be asked: names, files, packages. Needs no model."""
    harness: tuple[str, ...] = ()
    """Also ask these tasks of lm-evaluation-harness: names, or files NAME.yaml. Needs the extra `eval`."""
    ranks: Few = 1
    """Processes on this machine that share the questions and the text."""
    stage: Literal["pretrain", "sft", "rl"] | None = None
    """Evaluate only this stage. Default: the untrained model and every stage of the run."""


@dataclass
class _GenerateOptions(_ModelOptions):
    """Flags of both `quern complete` and `quern chat`."""

    refusals: ClassVar = (Refusal(ALL, _OF_THE_RUN, but="seed"),)  # --seed is that of the sampling

    sampling: Annotated[Sampling, Mark.FLAT] = CHAT
    max_tokens: Count = 256
    """The most tokens in a reply."""
    seed: Seed = 0
    """Seed of the sampling."""


@dataclass
class CompleteOptions(_GenerateOptions):
    """Flags of `quern complete`."""

    prompt: Annotated[str | None, Spelled("prompt", "-p")] = None
    """The beginning of the text, printed before its continuation; "" for the beginning of a document. Default, and
    with -: standard input."""
    stage: Literal["pretrain", "sft", "rl"] = "pretrain"
    """The stage whose model continues the text."""
    samples: Annotated[Few, Spelled("samples", "-n")] = 1
    """Completions of the prompt, separated by a line ---."""
    stop: Annotated[tuple[str, ...], Mark.REPEATED] = ()
    """End a completion before this text. Repeat the flag for several texts; $'\\n' is a newline in most shells."""

    def __post_init__(self) -> None:
        if "" in self.stop:
            raise ValueError("--stop is empty: give the text to stop before, or leave it out")


@dataclass
class ChatOptions(_GenerateOptions):
    """Flags of `quern chat`."""

    prompt: Annotated[str | None, Spelled("prompt", "-p")] = None
    """Ask this one question and exit; a base model continues it. Default: a conversation, whose
    questions can also come from a pipe, one in each line."""
    complete: bool = False
    """Continue texts instead of answering questions, by default with the base model."""
    stage: Literal["pretrain", "sft", "rl"] | None = None
    """The stage whose model replies. Default: the run's last stage; with --complete, pretrain."""

    def __post_init__(self) -> None:
        if self.prompt is not None and not self.prompt.strip():
            raise ValueError("--prompt is empty: ask something, or leave it out to chat")


@dataclass
class ServeOptions(_ModelOptions):
    """Flags of `quern serve`."""

    stage: Literal["pretrain", "sft", "rl"] | None = None
    """The stage whose model replies. Default: the run's last stage."""
    lan: bool = False
    """Serve the devices of this network, such as a phone: listen on every address, ask for a key, and print a link with
    both and its QR code. The key is made for this start; with --keys, those of the file are asked for."""
    host: str = ""
    """The address to listen on. Default: 127.0.0.1. Other hosts can connect to any but loopback: ask for --keys."""
    allowed_hosts: tuple[str, ...] = ()
    """Further host names for which to answer, such as chat.example.org. Known are IP addresses, localhost, --host and
    this machine's name; "*" is any name, which lets web pages reach the server by DNS rebinding."""
    trusted_proxy: Annotated[tuple[str, ...], Mark.RARE] = ()
    """Addresses or networks of proxies, such as 127.0.0.1: the client's address is then the one that they report in
    X-Forwarded-For. Default: none is believed."""
    port: Port = 8000
    """The port to listen on; 0 picks a free one."""
    keys: Path | None = None
    """A file with the SHA-256 hash of an API key and the holder's name in each line, which `quern serve keys add NAME`
    writes; it is read again when it changes. Default: no key is asked for."""
    access_log: Path | None = None
    """Append a JSON line for each request, without its text. Default: no log."""
    prefix_megabytes: Annotated[float, Interval(ge=0, le=1e6), Mark.RARE] = 256.0
    """Memory of each model for prompts that were read: later ones with the same beginning start sooner. 0 for none."""
    also: tuple[str, ...] = ()
    """Further runs to serve. Requests choose by name: quern-RUN."""
    watch_seconds: Annotated[float, Interval(ge=0, le=1e6), Mark.RARE] = 0.0
    """Look so often for a newer checkpoint, and send new requests to it; 0 for never."""
    replicas: Annotated[int, Interval(ge=1, le=2**10)] = 1
    """Processes that each have the models and share the port; on GPUs, one GPU each. The log names a port of each."""
    requests_per_minute: Annotated[int, Interval(ge=0, le=10**9)] = 0
    """POST requests a minute, on average, of one holder of a key or one address; 0 for any number."""
    requests_at_once: Annotated[int, Interval(ge=0, le=10**9)] = 0
    """The most open POST requests by one holder of a key, or by one address without keys; 0 for any number."""
    request_seconds: Annotated[Amount, Mark.RARE] = 600.0
    """The longest time that a request may take."""
    cors: Annotated[tuple[str, ...], Mark.RARE] = ()
    """Origins, as https://example.org, whose web pages may use the API in a browser. Default: none."""
    tls_cert: Path | None = None
    """The file of a certificate (PEM), to serve HTTPS; with --tls-key. Default: HTTP."""
    tls_key: Path | None = None
    """The file of the certificate's private key (PEM). Default: HTTP."""

    def __post_init__(self) -> None:
        if self.lan and (self.host or self.replicas > 1):
            raise ValueError("--lan listens on every address with one process: leave --host and --replicas out")
        self.host = self.host or ("0.0.0.0" if self.lan else "127.0.0.1")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("HTTPS needs both files: give --tls-cert and --tls-key")
        for flag, names, form, example in (
            ("cors", self.cors, r"\*|null|https?://[^/\s]+", "origins, as https://example.org"),
            ("allowed-hosts", self.allowed_hosts, r"\*|(\*\.)?[^/:*\s]+", "host names without a port, as example.org"),
        ):
            if wrong := [name for name in names if not re.fullmatch(form, name)]:
                raise ValueError(f"--{flag} takes {example}, not '{wrong[0]}'")
        for proxy in self.trusted_proxy:
            try:
                ip_network(proxy)
            except ValueError as error:
                raise ValueError(f"--trusted-proxy: {error}; give an address or a network, as 10.0.0.0/8") from None
        for flag, file in (("--tls-cert", self.tls_cert), ("--tls-key", self.tls_key)):
            if file and not file.is_file():
                raise ValueError(f"{flag} {file}: there is no such file; give a PEM file")
        if self.tls:
            try:  # with some passphrase: without one, OpenSSL asks for it in the terminal
                ssl.create_default_context().load_cert_chain(*self.tls, password="-")
            except OSError as error:
                why = f"({error.strerror}): give PEM files, the key without a passphrase"
                raise ValueError(f"--tls-cert and --tls-key are no certificate and its key {why}") from None

    @property
    def tls(self) -> tuple[Path, Path] | None:
        """The files of the certificate and of its key."""
        return (self.tls_cert, self.tls_key) if self.tls_cert and self.tls_key else None
