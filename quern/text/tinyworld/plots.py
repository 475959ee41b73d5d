"""The plots of the stories (plots.toml), and the words for their random fields."""

from quern.text.tinyworld.data import table, wordings, words

_TABLE, _WORDINGS = table("plots"), wordings("plots")
DAYS, MONTHS, SEASONS, WEATHER, TIMES = (words(_TABLE[key]) for key in "days months seasons weather times".split())
VESSELS, SMALL, THINGS, NUMBERS = (words(_TABLE[key]) for key in "vessels small things numbers".split())
Templates = tuple[str, ...]
SPOTS: Templates = _WORDINGS["spots"]
OPENINGS: Templates = _WORDINGS["openings"]
ENDINGS: Templates = _WORDINGS["endings"]
BRIDGES: Templates = _WORDINGS["bridges"]
MORALS: Templates = _WORDINGS["morals"]
PLOTS: tuple[tuple[Templates, ...], ...] = tuple(plot["scenes"] for plot in _WORDINGS["plots"])
