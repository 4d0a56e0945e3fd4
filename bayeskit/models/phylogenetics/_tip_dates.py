"""Dates of tips, read from the names of taxa and from tables."""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Mapping, Sequence

from bayeskit.errors import DataError, SettingsError, TreeError
from bayeskit.models.phylogenetics._newick import read_text

# A date is found between separators, by its form or by the format that is given, and becomes a decimal year.

_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_MONTH = (
    r"(?:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?|"
    r"nov(?:ember)?|dec(?:ember)?)"
)
#: Numbers of one or two digits around a mark and before a year: day and month in either order.
_TWO_NUMBERS = "two numbers and year"
#: Forms of dates, the longest first.
_FORMS = {
    name: re.compile(pattern, re.IGNORECASE)
    for name, pattern in {
        "year, month and day": r"(?P<year>\d{4})([-/.])(?P<month>\d{1,2})\2(?P<day>\d{1,2})",
        _TWO_NUMBERS: r"(?P<first>\d{1,2})(?P<mark>[-/.])(?P<second>\d{1,2})(?P=mark)(?P<year>\d{4})",
        "day, month by name and year": rf"(?P<day>\d{{1,2}})(-?)(?P<month>{_MONTH})\2(?P<year>\d{{4}})",
        "year, month by name and day": rf"(?P<year>\d{{4}})(-?)(?P<month>{_MONTH})\2(?P<day>\d{{1,2}})",
        "month by name and year": rf"(?P<month>{_MONTH})-?(?P<year>\d{{4}})",
        "year and month": r"(?P<year>\d{4})-(?P<month>\d{1,2})",
        "year": r"(?P<number>(?:1[5-9]|2[01])\d\d(?:\.\d+)?)",
    }.items()
}
#: A number of years, which is a date only where a separator or a column says so.
_NUMBER = re.compile(r"(?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)", re.IGNORECASE)
#: Such a number at the end of a name, but not behind another one, as in 26/05/14.
_AGE = re.compile(rf"[^_|@/\s\d]\d*/{_NUMBER.pattern}$", re.IGNORECASE)
_SEPARATORS = "_|@/"
_CODES = {"Y": r"\d{4}", "y": r"\d{2}", "m": r"\d{1,2}", "d": r"\d{1,2}", "j": r"\d{1,3}", "b": "[a-z]+", "B": "[a-z]+"}


class TipDates(dict[str, float]):
    """Dates in years by taxon, and how they were read.

    Parameters
    ----------
    dates : mapping of str to float
        Dates in years, which grow towards the present.
    rule : str
        Where the dates stood and how they were written.

    Attributes
    ----------
    rule : str

    Examples
    --------
    >>> dates_from_names(["A_26/05/2014", "B_04/06/2014"]).rule
    "at the end of each name: day, month and year, as '26/05/2014' shows"
    """

    def __init__(self, dates: Mapping[str, float], rule: str) -> None:
        super().__init__(dates)
        self.rule = rule


def dates_from_names(taxa: Sequence[str], separator: str | None = None, *, date_format: str | None = None) -> TipDates:
    """Read dates in the names of taxa, such as `A/2009.5`, `A_26/05/2014` or `A|26-May-2014|Kenya`.

    Parameters
    ----------
    taxa : sequence of str
    separator : str, optional
        The date is what stands behind the last of these. By default it stands between two of `_ | @ /`, or between one
        of them and the end of the name: at the end of all names, or else the only date of each name.
    date_format : str, optional
        Format of all dates in the codes of `datetime`: %Y, %y, %m, %d, %j, %b and %B, such as "%d/%m/%Y". By default
        told by the dates: 2009.5, 2014, 2014-05, 2014-05-26, 2014/05/26, 26/05/2014, 26-May-2014, 26May2014, May-2014.
        Of two numbers before a year, that which is above 12 in some name is the day in all of them.

    Returns
    -------
    TipDates
        Dates in years by taxon, a dictionary; its attribute `rule` tells how they were read. A calendar date is the
        year and the part of it that has passed at the start of the day; a month without a day counts as its first day.

    Raises
    ------
    DataError
        If a name holds no date or several, a date is not in the calendar, days cannot be told from months, or dates
        with and without '/' are mixed.
    SettingsError
        If `date_format` has other codes, or no year.

    Examples
    --------
    >>> dates_from_names(["A/2009.5", "B/2010-07-02"])
    {'A/2009.5': 2009.5, 'B/2010-07-02': 2010.4986301369863}
    >>> dates_from_names(["A_05/06/2014"], date_format="%d/%m/%Y")
    {'A_05/06/2014': 2014.4246575342465}
    """
    if isinstance(taxa, str) or not (separator is None or (isinstance(separator, str) and separator)):
        raise DataError("taxa must be a sequence of names and separator a text. Remedy: give alignment.taxa and '/'.")
    names = list(taxa)
    forms = list(_FORMS.values()) if date_format is None else [_pattern(date_format)]
    if separator is None:
        texts, place = _found_texts(names, forms)
    else:
        texts, place = (
            [_behind(name, separator, forms) for name in names],
            f"behind the last {separator!r} of each name",
        )
    odd = [text for text in texts if ("/" in text) != ("/" in texts[0])]
    if odd and date_format is None:
        raise DataError(
            f"taxa: the dates {texts[0]!r} of {names[0]!r} and {odd[0]!r} of {names[texts.index(odd[0])]!r} are "
            "written in two ways, and '/' separates parts of a date as well as parts of a name. Remedy: give "
            "date_format, or the dates as a dictionary."
        )
    values, written = _years(texts, [f"the taxon {name!r}" for name in names], date_format)
    return TipDates(dict(zip(names, values, strict=True)), f"{place}: {written}")


def dates_from_file(path: str | os.PathLike[str], *, date_format: str | None = None) -> TipDates:
    r"""Read a table of taxa and dates: two columns separated by tabulators or commas.

    Parameters
    ----------
    path : str or os.PathLike
        A first line without a date is skipped as the heading.
    date_format : str, optional
        As in `dates_from_names`.

    Returns
    -------
    TipDates
        Dates in years by taxon, read as in `dates_from_names`.

    Raises
    ------
    DataError
        If the file cannot be read, or a line does not hold a name and a date, or repeats a name, or days cannot be told
        from months.
    SettingsError
        If `date_format` has other codes, or no year.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "dates.tsv"
    >>> _ = path.write_text("taxon\tdate\nA\t2009.5\nB\t2010\n")
    >>> dates_from_file(path)
    {'A': 2009.5, 'B': 2010.0}
    """
    source = os.fspath(path)
    found: dict[str, tuple[str, str]] = {}
    try:
        lines = read_text(path, "a table of taxa and dates", TreeError).splitlines()
    except TreeError as error:
        raise DataError(str(error)) from error
    for number, line in enumerate(lines, start=1):
        cells = [cell.strip() for cell in re.split(r"[\t,]", line)]
        if not any(cells) or (number == 1 and not re.search(r"\d", cells[-1])):
            continue
        where = f"{source}, line {number}"
        if len(cells) != 2 or cells[0] in found:
            problem = f"{len(cells)} columns" if len(cells) != 2 else f"the taxon {cells[0]!r} occurs twice"
            raise DataError(f"{where}: {problem}. Remedy: write one taxon and its date a line.")
        found[cells[0]] = (cells[1], where)
    texts, places = [text for text, _ in found.values()], [where for _, where in found.values()]
    values, written = _years(texts, places, date_format)
    return TipDates(dict(zip(found, values, strict=True)), f"in the second column: {written}")


def _is_date(text: str, forms: Sequence[re.Pattern[str]]) -> bool:
    return any(form.fullmatch(text) for form in forms)


def _fields(name: str, forms: Sequence[re.Pattern[str]]) -> list[tuple[str, bool]]:
    """Return the dates between separators in a name, and whether each ends the name."""
    pieces = re.split(rf"([{re.escape(_SEPARATORS)}\s])", name)
    found, start = [], 0
    while start < len(pieces):
        # A date may hold separators itself, so the longest one is taken.
        for end in range(min(start + 5, len(pieces)), start, -2):
            text = "".join(pieces[start:end])
            if _is_date(text, forms):
                found.append((text, end >= len(pieces)))
                start = end - 1
                break
        start += 2
    return found


def _found_texts(names: Sequence[str], forms: Sequence[re.Pattern[str]]) -> tuple[list[str], str]:
    """Return the date in each name, and where it stands."""
    found = [_fields(name, forms) for name in names]
    if all(fields and fields[-1][1] for fields in found):
        return [fields[-1][0] for fields in found], "at the end of each name"
    if all(len(fields) == 1 for fields in found):
        return [fields[0][0] for fields in found], "within each name"
    ages = [_AGE.search(name) for name in names]
    if not any(found) and all(ages):
        return [age["number"] for age in ages if age], "behind the last '/' of each name"
    name, fields = next((name, fields) for name, fields in zip(names, found, strict=True) if len(fields) != 1)
    if not fields:
        raise _no_date(name.rpartition("/")[2], f"the taxon {name!r}")
    several = " and ".join(repr(text) for text, _ in fields[:3])
    raise DataError(
        f"the taxon {name!r}: {several} may be its date. Remedy: give the separator in front of the date, or "
        "date_format, or the dates as a dictionary."
    )


def _behind(name: str, separator: str, forms: Sequence[re.Pattern[str]]) -> str:
    """Return the longest date behind a separator at the end of a name, or else all that is behind the last one."""
    pieces = name.split(separator)
    ends = [separator.join(pieces[-count:]) for count in (3, 2, 1)]
    return next((text for text in ends if _is_date(text, forms)), pieces[-1])


def _years(texts: Sequence[str], places: Sequence[str], date_format: str | None) -> tuple[list[float], str]:
    """Return dates as years, and how they are written."""
    if date_format is not None:
        pattern = _pattern(date_format)
        return [
            _formatted(text, place, date_format, pattern) for text, place in zip(texts, places, strict=True)
        ], date_format
    found = [_match(text, place) for text, place in zip(texts, places, strict=True)]
    day, shown = _place_of_day(found, places)
    ordered = f"{'day, month' if day == 'first' else 'month, day'} and year{shown}"
    said = dict.fromkeys(ordered if name == _TWO_NUMBERS else name for name, _ in found)
    values = []
    for text, place, (_, match) in zip(texts, places, found, strict=True):
        parts = match.groupdict()
        if "number" in parts:
            values.append(float(parts["number"]))
            continue
        if "first" in parts:
            parts["day"], parts["month"] = parts[day], parts["second" if day == "first" else "first"]
        month = parts["month"]
        number = int(month) if month.isdigit() else _MONTHS.index(month[:3].lower()) + 1
        values.append(_decimal_year(int(parts["year"]), number, int(parts.get("day") or 1), text, place))
    return values, ", or ".join(said)


def _match(text: str, place: str) -> tuple[str, re.Match[str]]:
    """Return the form of a date and its parts."""
    for name, form in (*_FORMS.items(), ("number of years", _NUMBER)):
        if match := form.fullmatch(text):
            return name, match
    raise _no_date(text, place)


def _place_of_day(found: Sequence[tuple[str, re.Match[str]]], places: Sequence[str]) -> tuple[str, str]:
    """Return which of two numbers before a year is the day, "first" or "second", and what shows it."""
    dates = [(match, place) for (name, match), place in zip(found, places, strict=True) if name == _TWO_NUMBERS]
    pairs = (("first", "second"), ("second", "first"))
    shows = {day: [(m, place) for m, place in dates if int(m[day]) > 12 >= int(m[month])] for day, month in pairs}
    if shows["first"] and shows["second"]:
        (one, where), (other, there) = shows["first"][0], shows["second"][0]
        raise DataError(
            f"{where}: in {one.group()!r} the day is first, but in {other.group()!r} of {there} it is second. Remedy: "
            "write all dates in one order, or give dates as a dictionary."
        )
    for day, clear in shows.items():
        if clear:
            return day, f", as {clear[0][0].group()!r} shows"
    for match, place in dates:
        if int(match["first"]) != int(match["second"]) <= 12:
            mark = match["mark"]
            raise DataError(
                f"{place}: in {match.group()!r} the day cannot be told from the month, and no other date has a number "
                f'above 12. Remedy: give date_format="%d{mark}%m{mark}%Y" or "%m{mark}%d{mark}%Y".'
            )
    return "first", ""


def _pattern(date_format: object) -> re.Pattern[str]:
    """Return what a format of dates matches."""
    parts = re.split(r"(%.?)", date_format) if isinstance(date_format, str) else []
    codes = [part[1:] for part in parts if part.startswith("%")]
    if not {"Y", "y"} & set(codes) or not set(codes) <= set(_CODES):
        raise SettingsError(
            f"date_format={date_format!r} is no format of dates with a year. Remedy: use the codes %Y, %y, %m, %d, %j, "
            '%b and %B, such as "%d/%m/%Y".'
        )
    text = "".join(_CODES[part[1:]] if part.startswith("%") else re.escape(part) for part in parts)
    return re.compile(text, re.IGNORECASE)


def _formatted(text: str, place: str, date_format: str, pattern: re.Pattern[str]) -> float:
    try:
        if pattern.fullmatch(text):
            date = datetime.datetime.strptime(text, date_format)
            return _decimal_year(date.year, date.month, date.day, text, place)
    except ValueError:
        pass
    raise DataError(
        f"{place}: {text!r} is not a date in the format {date_format!r}. Remedy: correct one of them, or give dates as "
        "a dictionary."
    )


def _decimal_year(year: int, month: int, day: int, text: str, place: str) -> float:
    """Return the year and the part of it that has passed at the start of a day."""
    try:
        start, following = datetime.date(year, 1, 1), datetime.date(year + 1, 1, 1)
        return year + (datetime.date(year, month, day) - start).days / (following - start).days
    except ValueError as error:
        raise _no_date(text, place) from error


def _no_date(text: str, place: str) -> DataError:
    return DataError(
        f"{place}: {text!r} is not a date. Remedy: write a number such as 2009.5 or a day such as 2009-07-02 between "
        f"two of {' '.join(_SEPARATORS)} or at the end, or give dates as a dictionary."
    )
