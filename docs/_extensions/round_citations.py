"""Citations as statisticians write them: Neal (2001), or (Neal, 2001)."""

from __future__ import annotations

from dataclasses import dataclass, field

from sphinxcontrib.bibtex.plugin import register_plugin
from sphinxcontrib.bibtex.style.referencing import BracketStyle
from sphinxcontrib.bibtex.style.referencing.author_year import AuthorYearReferenceStyle

NAME = "author_year_round"


def _round() -> BracketStyle:
    return BracketStyle(left="(", right=")", sep="; ")


@dataclass
class RoundAuthorYear(AuthorYearReferenceStyle):
    """Author and year with round brackets."""

    bracket_textual: BracketStyle = field(default_factory=_round)
    bracket_parenthetical: BracketStyle = field(default_factory=_round)
    bracket_author: BracketStyle = field(default_factory=_round)
    bracket_label: BracketStyle = field(default_factory=_round)
    bracket_year: BracketStyle = field(default_factory=_round)


register_plugin("sphinxcontrib.bibtex.style.referencing", NAME, RoundAuthorYear)
