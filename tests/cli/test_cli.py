"""The command line as someone sees it who mistypes, asks for help, or brings a recipe of their own."""

import contextlib
import os
import re
import shlex
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

from quern.bench.options import BenchOptions
from quern.cli import completion, lab, main, options, summaries, verbs
from quern.estimate.options import PlanOptions
from quern.field_types import range_of
from quern.flags import check_flags
from quern.flags.recipe_flags import Arguments
from quern.generate.sampling import Sampling
from quern.interop.command import ExportOptions, ImportOptions
from quern.lab.options import BoardOptions, CompareOptions, ScalingOptions, SweepOptions
from quern.runs.run_dir import RunDir
from quern.stages.jax import command as jax_command

RECIPE_FILE = """
from dataclasses import replace
from quern.model.gpt import GPT
from quern.recipes.gpt import RECIPE as BASE

class Quiet(GPT):
    \"\"\"A class of one's own.\"\"\"

RECIPE = replace(BASE, name="quiet", depth=2, make_model=Quiet)
"""


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Runs a command that must fail, without a traceback; returns what it said, on one line."""
    try:
        code = main.main(list(arguments))
    except SystemExit as error:
        code = error.code
    said = capsys.readouterr()
    text = said.out + said.err
    assert code in (1, 2), text
    assert "Traceback" not in text
    return " ".join(text.replace("│", " ").split())


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["help"]])
def test_without_a_verb_it_says_what_there_is(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(arguments) == 0
    text = capsys.readouterr().out
    for verb in verbs.VERBS:
        assert f"\n  {verb} " in text and summaries.EXAMPLES[verb] in text
    told = "recipes: gpt, llama, llama_adamw, unet, or the path of a Python file that ends in RECIPE"
    assert told in " ".join(text.split())


HELP = [*verbs.VERBS, "serve keys", "serve keys add", *(f"lab {tool}" for tool in lab.TOOLS)]
HELP += [f"grug {verb}" for verb in ("train", "eval", "export", "import", "gauntlet")]


@pytest.mark.parametrize("verb", HELP)
def test_every_verb_explains_itself_its_flags_and_their_defaults(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit) as stopped:
        main.main([*verb.split(), "--help-all"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    takes = {"pretrain": "[RECIPE|RUN] ", "prepare": "[RECIPE] ", "chat": "[RUN] ", "report": "[RUN] "}
    assert f"usage: quern {verb} {takes.get(verb, '')}" in text
    assert ("lab" not in verb and " " in verb) or f"example: quern {verb}" in text
    assert "None" not in text
    rows = [row for row in re.split(r"\n {0,2}(?=\S)", text.replace("│", " ")) if re.match("--?[a-z]", row)]
    silent = [row for row in rows if not re.search(r"[Dd]efault|\((required|repeatable)\)|--help", row)]
    bare = [
        row
        for row in rows
        if not re.search(r"[a-z]+\W+\w+", re.sub(r"^.*?(  |\n)|\(default: .*?\)", "", row, flags=re.DOTALL))
    ]
    assert bare == [] and (rows or verb in ("grug", "lab"))
    assert verb not in ("sft", "rl") or "; follows)" not in text, "these stages do not derive it so"
    assert not silent, "these flags say no default, and are neither required nor repeatable"


@cache
def flags_of(*verb: str) -> list[str]:
    return completion.flags(list(verb), main.run_verb)


def test_help_is_short_and_within_the_terminal_and_help_all_shows_the_rest(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = {}
    for columns, verb in [(60, ""), *((80, verb) for verb in HELP)]:
        monkeypatch.setenv("COLUMNS", str(columns))
        with contextlib.suppress(SystemExit):
            main.main(["help", *verb.split()])
        text = shown[verb] = capsys.readouterr().out
        assert f"usage: quern {verb}" in text and len(text.splitlines()) <= (60 if verb == "run" else 80), verb
        wide = [line for line in text.splitlines() if len(line) > columns]
        assert all(re.match("(  |example: |usage: )quern ", line) for line in wide), verb  # of commands to copy
        told = re.findall(r"^[│ ]{1,2}(--(?!help)[a-z][\w.-]+)", text, re.MULTILINE)
        assert not told or set(flags_of(*verb.split())).issuperset(told)
    assert "--train.steps" in shown["run"] and "--model.width" not in shown["run"] and "--tp" not in shown["run"]
    assert {"--model.width", "--tp", "--train.steps"} <= set(flags_of("run"))
    assert "all flags, also of model, optim, sft, text, train: quern run --help-all" in shown["run"]
    assert all(f"\n  {verb} " in shown["grug"] for verb in jax_command.VERBS)
    assert "--rl.kl" in shown["rl"] and "--sft.too-long" in shown["sft"]


COMPLETED = {
    "ru": "run runs",
    "chat qu": "quick",
    "chat quick --tem": "--temperature",
    "chat --run qu": "quick",
    "lab sw": "sweep",
    "lab sweep --samp": "--sampler",
    "grug train --train.st": "--train.steps",
    "runs rem": "remove",
}
"""Words typed after quern → what the Tab key offers."""
WORDS = """source ./script
while read -r typed; do COMP_WORDS=(quern $typed); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _quern; echo "${COMPREPLY[@]}"
done"""


def test_bash_completes_verbs_flags_and_runs(tmp_path: Path) -> None:
    for run in "quick", "quick$(touch${IFS}executed)":
        (tmp_path / "out" / "runs" / run).mkdir(parents=True)
    (tmp_path / "script").write_text(scripts()["bash"], encoding="utf-8")
    command, typed = ["bash", "-c", WORDS], "".join(f"{line}\n" for line in COMPLETED)
    done = subprocess.run(command, cwd=tmp_path, input=typed, capture_output=True, text=True, check=True)
    assert (done.stdout.splitlines(), done.stderr) == ([*COMPLETED.values()], "")
    assert not (tmp_path / "executed").exists()


@cache
def scripts() -> dict[str, str]:
    def tell(words: list[str]) -> int:
        print(*flags_of(*words[:-1]))
        return 0

    return {shell: completion.script([shell], tell) for shell in completion.SHELLS}


def test_every_shell_has_its_script_and_others_are_told_which(capsys: pytest.CaptureFixture[str]) -> None:
    assert scripts()["zsh"] == f"autoload -Uz bashcompinit && bashcompinit\n{scripts()['bash']}"
    assert "    case '2 lab *'; string split -- ' ' 'compare ladder" in scripts()["fish"]
    assert re.search(r"case '\* chat \* -\*'; string split -- ' ' '.*--temperature", scripts()["fish"])
    told = "name your shell: quern completion bash, whose output goes into ~/.local"
    assert told in refused(capsys, "completion", "sh")


def test_a_run_may_follow_the_verb_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_run(verb: str, *words: str) -> list[str]:
        return [*verbs.with_run(verb, Arguments(words))]

    for verb in ("sft", "rl", "evaluate", "complete", "chat", "serve", "report", "export"):
        assert with_run(verb, "mine", "--out", "x") == ["--run", "mine", "--out", "x"]
    assert with_run("grug", "eval", "mine") == ["eval", "--run", "mine"]
    for verb in ("run", "pretrain"):
        (tmp_path / "runs" / "mine").mkdir(parents=True, exist_ok=True)
        line = ["mine", "--resume", "--out", str(tmp_path)]
        assert with_run(verb, *line) == ["--run", *line]
    unchanged = "import export,runs import,complete Once.py,chat gpt,chat -p mine,chat,import mine,grug train mine"
    for line in [*unchanged.split(","), "runs mine"]:
        verb, *words = line.split()
        assert with_run(verb, *words) == words
    for name in ("mine.txt", "our notes.txt"):
        (tmp_path / name).touch()
    for verb in ("run", "pretrain", "prepare"):
        for text in ("mine.txt", str(tmp_path), "our notes.txt"):
            told = f"--data before it: --data {shlex.quote(text)}$"
            with monkeypatch.context() as here, pytest.raises(ValueError, match=told):
                here.chdir(tmp_path)
                verbs.parse(verb, verbs.with_run(verb, Arguments((text,))), verbs.PrepareOptions)


def test_what_follows_a_report_opens_the_model_that_the_run_has(tmp_path: Path) -> None:
    run_dir, report = RunDir(tmp_path, "mine"), Arguments(("--run", "mine", "--out", str(tmp_path)))
    run_dir.folder.mkdir(parents=True)
    assert summaries.following("report", report) == ""
    for stage, verb in (("grug", "grug export --run"), ("pretrain", "chat")):
        (run_dir.checkpoints(stage) / "step-00000001").mkdir(parents=True)
        assert summaries.following("report", report).startswith(f"next: `quern {verb} mine --out ")
        if stage == "grug":
            with pytest.raises(FileNotFoundError, match=f"no model yet: `quern {verb} mine --out .*` makes one"):
                run_dir.require_trained(None)
    train = Arguments(("train", *report))
    assert summaries.following("grug", train).startswith("next: `quern grug export --run mine ")
    for stage, file in (("pretrain", "origin.json"), ("grug", "recipe.json")):  # PyTorch's base model; a file's model
        (run_dir.stage(stage) / file).write_text('{"make_model": "idea:Sinks"}', encoding="utf-8")
        assert summaries.following("grug", train) == ""  # `quern grug export` would refuse
        (run_dir.stage(stage) / file).unlink()
    for name in ("llama", "keys", "own.py"):  # which behind a verb mean something else
        own = summaries.following("pretrain", Arguments(("--run", name)))
        assert own == f"next: `quern sft --run {name}`, `quern chat --run {name}`"


REFUSED = r"""
pretrian → ^quern: there is no 'pretrian'; nearest: pretrain; all of them: quern --help$
lab sweeps → ^quern lab: the lab has no 'sweeps'; nearest: sweep; all of them: quern lab$
grug trian → ^quern grug: there is no 'grug trian'; nearest: train; all of them: quern grug$
chat his -p x → ^quern chat: there is no run 'his' under .*/out: make one with `quern run`
serve his --run hers → ^quern serve: the run is named twice, as his and by --run: leave one of them out$
chat -p x his → 'his' belongs to no option: .*; the name of a run follows the verb at once, a text follows -p
chat Hello? → the text needs -p before it: quern chat -p 'Hello\?'
pretrain nope → there is no run and no recipe 'nope': --run nope gives a new run this name; recipes are gpt, llama,
pretrain --dpeth 3 → ^quern pretrain: unknown option --dpeth; nearest: --depth.*: quern pretrain --help$
pretrain --depth 0 --no-compile → ^quern pretrain: --depth must be a whole number between 1 and 1,000, not 0$
pretrain --run a/b --no-compile → 'a/b' cannot name a run: use letters, digits, dots, dashes
prepare --data no/such/file → --data no/such/file: there is no such file, folder or data set; use tinyworld
bench quality --train . --val . --data nope → ^quern bench: --data nope: there is no such file or folder$
bench everything → ^quern bench: the argument takes one of tokenizer, .*train, .*, not 'everything'$
run --ranks 4 --tp 3 → quern run: --tp 3 does not divide 4 ranks: use one of \[1, 2, 4\]
run --ranks 2 --train.batch-tokens 10 → train.batch-tokens must be a multiple of model.context
run --nodes 2 --ranks 2 → --nodes 2 needs --rendezvous host:port, the same on every node
serve --tls-cert /etc/hosts --tls-key /etc/hosts → ^quern serve: --tls-cert and --tls-key are no certificate and its key
serve --lan --host 127.0.0.1 → --lan listens on every address with one process: leave --host and --replicas out$
serve --cors https://a.org/ → ^quern serve: --cors takes origins, as https://example.org, not 'https://a.org/'$
serve --trusted-proxy home → ^quern serve: --trusted-proxy: 'home' .* give an address or a network
serve --allowed-hosts a.org:80 → --allowed-hosts takes host names without a port, as example.org, not 'a.org:80'$
run --resume → there is no run 'first' under /.*/out: make one with `quern run`, or name
sft --model.width 64 → quern sft: --model.width is decided by the base run, .*: leave it out, or pretrain another
sft --train.steps 3 → ^quern sft: --train.steps belongs to pretraining: leave it out, or give --sft.steps$
sft --train.batch-tokens 3 → ^quern sft: --train.batch-tokens belongs to pretraining: .* --sft.batch-tokens$
rl --train.steps 3 → ^quern rl: --train.steps belongs to pretraining: leave it out, or give --rl.steps$
sft llama → quern sft: the run has its recipe already: leave 'llama' out, and name the run with --run
pretrain --sft.steps 3 → --sft.steps is for fine-tuning: give it to `quern sft` or `quern run`
pretrain --questions 3 → --questions is for `quern evaluate` and `quern run`
sft --workers 3 → --workers does nothing in `quern sft`: give it to `quern prepare`, `quern pretrain` or
prepare --train.steps 3 → --train.steps does nothing in `quern prepare`: give it to the verb that trains
prepare --ray auto → --ray names a cluster: give --engine ray with it, or leave it out
tokenizer --engine ray → --engine is for `quern prepare`
pretrain --from-step 3 → --from-step chooses a checkpoint of another run: name that run with --from$
pretrain --from= → --from is empty: give a name, or leave it out
lab compare gpt llama --every → --rungs and --every are for the ladder: add --ladder, or leave them out
lab plan --train.minutes 5 → ^quern lab: --train.minutes is a time on this machine, .*: give --train.steps$
lab plan --text.tokenizer a.json → ^quern lab: --text.tokenizer is not read for a plan: .* --text.vocab-size$
lab sweep --sampler grid --space optim.matrix-lr=1e-1..1 --trials 5 → : --trials does nothing with --sampler grid
lab scaling --sizes 1 → ^quern lab: --sizes needs at least 4 sizes: fewer do not determine a minimum$
rl --rl.rewards gsm8k --rl.data nope → ^quern rl: --rl.data nope: there is no such file or folder$
rl --rl.data . → --rl.data is for --rl.rewards gsm8k and programs: name one of them, or leave it out$
run --sft.tests nope → ^quern run: --sft.tests nope: there is no such file or folder$
lab log --study ../x → ^quern lab: a study cannot be called '../x': give --study letters, digits, - _ and \.$
lab compare gpt gpt → ^quern lab: two arms have the name gpt: give every arm's file a name of its own$
evaluate --depth 3 → quern evaluate: --depth belongs to the run's recipe and cannot change: leave it out
pretrain --name x → --name comes with the recipe: to name the run, use --run
prepare --name x → --name comes with the recipe: to name the run, use --run
prepare --model.bos 3 → --model.bos follows from the tokenizer$
sft --model.depth 3 → --model.depth follows from --depth
pretrain --model.dropout 0.1 → --model.dropout does nothing in the 'gpt' recipe: leave it out; .*model.heads
pretrain --model.depth 3 → --model.depth follows from --depth
pretrain --model.vocab-size 400 → --model.vocab-size follows from the tokenizer: set --text.vocab-size
tokenizer --text.tokenizer t.json → --text.tokenizer names a tokenizer, and `quern tokenizer` trains one: le
prepare --text.column body → --text.column is for files of text in a --data of your own: leave it out
prepare --data hf:a/b --data.include *.md → --data.include chooses files in folders, and --data names none
prepare --data wikitext --data.include *.md → --data.include chooses files in folders, and --data names none
run --data /dev/nul* --data.exclude *.md → --data.exclude chooses files in folders, and --data names none that exist
run --data a.txt --text.separator= → text.separator is empty: give the mark that ends a document
pretrain --data a.txt --text.tinyworld-megabytes 1 → --data names another text: leave one of them out
run --chat --no-sft --no-compile → --chat asks for fine-tuning, and --no-sft for none: leave one of them out$
run --no-sft --sft.steps 5 --no-compile → --sft.steps asks for fine-tuning, and --no-sft for none: leave one of them
prepare --data a.txt --text.encoding klingon → text.encoding is auto, utf-8, cp1252 or the like, not klingon
pretrain --shards 2 → --shards is the number of files of a public data set
pretrain llama --model.softcap 15.0 → --model.softcap does nothing in the 'llama' recipe: .*model.dropout
prepare --data gsm8k → --data gsm8k: the set holds questions to fine-tune on, no text: give it to --conversations
prepare --data a.bin → --data a.bin: there is no such file, folder or data set; use tinyworld
prepare --data tinyworld wikitext → --data tinyworld: a data set is read alone, without files or other sets: leave
pretrain --data . wikitext → --data wikitext: a data set is read alone, without files or other sets: leave
prepare --data fineweb-gpt2 --text.tokenizer a.json → ^quern prepare: --text.tokenizer a.json: there is no such file$
pretrain --data . --val a.txt → ^quern pretrain: --val a.txt: there is no such file or folder$
prepare --data fineweb-education → no such file, folder or data set; use tinyworld, a path, one of tinystories
pretrain --val a.txt → --val is for a --data of your own: the built-in world makes its own
pretrain --train.steps 3 --train.minutes 1 → --train.steps and --train.minutes contradict each other
sft --sft.epochs 3 --sft.steps 5 → --sft.epochs and --sft.steps contradict each other: give one of them
pretrain unet --depth 3 --no-compile --dtype fp32 → unet needs an even depth|depth must be even
run --no-sft --text.tinyworld-conversations 5 --no-compile → --text.tinyworld-conversations asks .*, and --no-sft for
export --to hf --dtype q8_0 --dir x → --to hf takes --dtype fp32 or bf16, not q8_0: only gguf has that one
export --to hf --dtype fp16 --dir x → --to hf takes --dtype fp32 or bf16, not fp16: only gguf has that one
export --to gguf --dtype fp8 → --dtype takes one of fp32, bf16, fp16, q8_0, not 'fp8'
export --to hf --accept-other-ids --dir x → --accept-other-ids is for --to gguf
run gpt --for ollama → ollama cannot read a model of the recipe 'gpt': leave --for ollama out, or train one of llama
run llama --model.windows SSSL --for llama.cpp → train with --model.windows L
run llama --model.windows SSSL --for transformers → train with --model.windows L
run llama --model.heads 3 --for transformers → transformers refuses a width of 256 for 3 heads
run llama --text.digits 2 --for ollama → use --text.digits 1 with --for ollama
run --for lmstudio → --for takes one of ollama, llama.cpp, transformers
"""
"""Command lines, and the message of each as a regular expression."""


@pytest.mark.parametrize(("arguments", "expected"), [row.split(" → ") for row in REFUSED.strip().splitlines()])
def test_what_is_mistyped_is_named_with_what_is_valid(
    arguments: str, expected: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = refused(capsys, *arguments.split())
    assert re.search(expected, said), said
    assert list(tmp_path.iterdir()) == []  # nothing of what was refused is left


def test_every_number_among_the_flags_has_its_range() -> None:
    kinds = [options.PrepareOptions, options.RunAllOptions, options.PretrainOptions, options.EvaluateOptions]
    kinds += [options.CompleteOptions, options.ChatOptions, options.ServeOptions, options.ReportOptions]
    kinds += [ImportOptions, BenchOptions, ExportOptions, PlanOptions, CompareOptions, ScalingOptions, SweepOptions]
    kinds += [BoardOptions, jax_command.JaxTrainOptions, jax_command.JaxMoveOptions, jax_command.GauntletOptions]
    flags = [flag for kind in kinds for flag in check_flags.flags_of(kind)]
    assert [flag.name for flag in flags if flag.kind in check_flags.NUMBERS and range_of(flag.annotation) is None] == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = 1\nRECIPE = (\n", r"{path}, line 2: SyntaxError: '\(' was never closed$"),
        ("def half():\n    return 1 / 0\n\nRECIPE = half()\n", "{path}, line 2: ZeroDivisionError: division by zero$"),
        ("RECIPE = 'gpt'\n", "{path} does not end in RECIPE = … .a quern.recipe.Recipe.$"),
        (f"{RECIPE_FILE}RECIPE = replace(RECIPE, data=None)\n", "data must be a text, not None"),
        (f"{RECIPE_FILE}RECIPE = replace(RECIPE, train=3)\n", "train must be a TrainRecipe, as in replace.BASEL"),
    ],
)
def test_a_broken_file_says_where(text: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "broken.py"
    path.write_text(text, encoding="utf-8")
    said = refused(capsys, "pretrain", str(path))
    assert re.match(f"quern pretrain: {expected.format(path=re.escape(str(path)))}", said), said


def test_a_tilde_is_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No shell expands it behind "=", and none reads a recipe's file."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(tmp_path)
    (home / "r.py").write_text(
        "from dataclasses import replace\nfrom quern.recipes.gpt import RECIPE\n"
        "RECIPE = replace(RECIPE, data='~/a.txt', val='~/b.txt', conversations='~/c.jsonl,repeats=2',\n"
        "    text=replace(RECIPE.text, tokenizer='~/t.json'), sft=replace(RECIPE.sft, tests='~/d'),\n"
        "    rl=replace(RECIPE.rl, rewards=('gsm8k', '~/f.py'), data='~/e'))\n",
        encoding="utf-8",
    )
    recipe = verbs.parse("run", Arguments([str(home / "r.py")]), options.RunAllOptions)[0].recipe
    found = [recipe.data, recipe.val, recipe.conversations[0].source, recipe.text.tokenizer, recipe.sft.tests]
    found += [recipe.rl.data, recipe.rl.rewards[1]]
    assert found == [str(home / name) for name in "a.txt b.txt c.jsonl t.json d e f.py".split()]
    assert str(home / "out") in refused(capsys, "report", "--out=~/out")


def test_every_field_of_sampling_is_a_flag() -> None:
    flags = "--temperature 0.5 --top-k 3 --top-p 0.9 --min-p 0.1 --max-tokens 5 --seed 4".split()
    for verb, kind in (("chat", options.ChatOptions), ("complete", options.CompleteOptions)):
        parsed, _ = verbs.parse(verb, Arguments(list(map(str, flags))), kind)
        assert (parsed.sampling, parsed.max_tokens, parsed.seed) == (Sampling(0.5, 3, 0.9, 0.1), 5, 4)
        assert verbs.parse(verb, Arguments([]), kind)[0].sampling == Sampling(0.7, 50)


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        *((f"{verb} --run nosuch", "there is no run 'nosuch' under ") for verb in ("serve", "chat", "complete -p x")),
        *((f"{verb} --run nosuch", "there is no run 'nosuch' under ") for verb in ("evaluate", "sft", "rl")),
        ("pretrain --from nosuch --run new", "there is no run 'nosuch' under "),
        ("sft --from base --run r --conversations no.jsonl", "--conversations no.jsonl: there is no such file, folder"),
        ("run --run r --conversations no.jsonl", "--conversations no.jsonl: there is no such file, folder or data set"),
        ("rl --from base --run r --rl.rewards sums nope", "rl.rewards: there is no 'nope': use gsm8k, programs, sums,"),
    ],
)
def test_what_is_missing_is_said_before_the_machine_is_tried_out(
    command: str, reason: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(options.RunOptions, "machine", lambda *found, **more: pytest.fail("the machine was tried out"))
    for stage in ("pretrain", "sft"):
        (tmp_path / f"runs/base/{stage}/checkpoints/step-00000001").mkdir(parents=True)
    said = refused(capsys, *command.split(), "--out", str(tmp_path))
    assert said.partition(": ")[2].startswith(reason), said


def test_an_ascii_terminal_is_enough() -> None:
    command = [sys.executable, "-m", "quern", "tokenizer", "--data", "no\u2192such\u043d\u0435\udce9"]
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii:strict", "TERM": "xterm"}
    done = subprocess.run(command, env=ascii_only, capture_output=True, text=True, encoding="ascii")
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert "no\\u2192such\\u043d\\u0435\\udce9" in done.stderr


def test_nothing_tells_to_install_a_strangers_package() -> None:
    """The package index has a project of another owner under the name quern."""
    root = Path(__file__).parents[2]
    texts = [root / "README.md", root / "Makefile", *(root / "docs").rglob("*.md"), *(root / "quern").rglob("*.py")]
    told = re.compile(r"(install|uvx?|pipx)\s+(-\S+\s+)*['\"]?quern\b|['\"]quern\[")
    assert [str(path) for path in texts if told.search(path.read_text(encoding="utf-8"))] == []
    assert tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["name"] != "quern"
