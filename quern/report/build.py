"""Writes the report of a run: report.md and a self-contained report.html, from the run's records alone.

`run_records` reads, `document` models the report, `markdown` and the template report.html.jinja render it. No
checkpoint is opened and no model runs, so a report can be built anywhere, at any time, and of a run that stopped half
way.
"""

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from quern.report.document import Document, document
from quern.report.markdown import markdown
from quern.report.run_records import read_run
from quern.temporaries import write_whole
from quern.text.printable import printable

FOLDER = Path(__file__).parent


def build(run_folder: Path) -> tuple[Path, Path]:
    """Writes report.md and report.html into the run's folder.

    Returns:
        The paths of both files.

    Raises:
        FileNotFoundError: The folder holds no records.
        OSError: A file cannot be written; its previous version is kept.
    """
    report = document(read_run(run_folder))
    return (
        _write(run_folder / "report.md", markdown(report)),
        _write(run_folder / "report.html", page(report)),
    )


def page(report: Document) -> str:
    """The report as one HTML page. Every value is escaped, because a sample can hold any text."""
    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["position"] = _position
    style = (FOLDER / "report.css").read_text(encoding="utf-8")
    return environment.get_template("report.html.jinja").render(report=report, style=style)


def _position(share: float) -> str:
    """A share as a CSS length inside its element."""
    return f"{100 * min(1.0, max(0.0, share)):.2f}%"


def _write(path: Path, text: str) -> Path:
    """Writes the file whole. Control characters and lone surrogates become a replacement sign."""
    try:
        write_whole(path, printable(text))
    except OSError as error:
        raise OSError(f"cannot write {path} ({error.strerror}): make room, or make its folder writable") from error
    return path
