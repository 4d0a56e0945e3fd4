"""Dates of tips in names and tables: all forms against the calendar, and what is refused."""

import copy
import datetime
import pickle

import pytest

from bayeskit.errors import DataError, SettingsError
from bayeskit.models.phylogenetics import DatedTopology, TipDates, dates_from_file, dates_from_names


def years(year: int, month: int = 1, day: int = 1) -> float:
    """Divide the days since the start of the year by those of the year."""
    start, end = datetime.datetime(year, 1, 1), datetime.datetime(year + 1, 1, 1)
    return year + (datetime.datetime(year, month, day) - start) / (end - start)


FORMS = {
    "2014": (2014, 1, 1),
    "2014-05-26": (2014, 5, 26),
    "2014/05/26": (2014, 5, 26),
    "2014.05.26": (2014, 5, 26),
    "2014-5-6": (2014, 5, 6),
    "2014-05": (2014, 5, 1),
    "2016-02-29": (2016, 2, 29),
    "26/05/2014": (2014, 5, 26),
    "26-05-2014": (2014, 5, 26),
    "26.05.2014": (2014, 5, 26),
    "05/26/2014": (2014, 5, 26),
    "05/05/2014": (2014, 5, 5),
    "26-May-2014": (2014, 5, 26),
    "26May2014": (2014, 5, 26),
    "6-september-2014": (2014, 9, 6),
    "2014-May-26": (2014, 5, 26),
    "2014MAY26": (2014, 5, 26),
    "May-2014": (2014, 5, 1),
    "Sept2014": (2014, 9, 1),
    "31-Dec-2012": (2012, 12, 31),
}


@pytest.mark.parametrize("text", FORMS)
def test_each_form_of_a_date(text, tmp_path):
    expected = years(*FORMS[text])
    names = [f"A_{text}", f"b|x/{text}", f"C@{text}", text, f"{text}_Kenya", f"X/12|{text}|Kenya", f"two words {text}"]
    for name in names:
        assert dates_from_names([name]) == {name: pytest.approx(expected, abs=1e-12)}
    assert dates_from_names([f"A-{text}"], "-") == {f"A-{text}": pytest.approx(expected, abs=1e-12)}
    path = tmp_path / "dates.csv"
    path.write_text(f"A,{text}\nB,2000.5\n")
    assert dates_from_file(path) == {"A": pytest.approx(expected, abs=1e-12), "B": 2000.5}


def test_the_place_of_the_date():
    end = ["A/Texas/1234/2003", "B_1999_x/2004.25"]
    assert dates_from_names(end) == {end[0]: 2003.0, end[1]: 2004.25}
    assert dates_from_names(end).rule == "at the end of each name: year"
    within = ["A|2003|Kenya", "B|2004-07|x_2"]
    assert dates_from_names(within) == {within[0]: 2003.0, within[1]: years(2004, 7)}
    assert dates_from_names(within).rule == "within each name: year, or year and month"
    last = ["a_b_2001", "c_1999.25", "d_2000-03-01", "e_2000-12"]
    found = dates_from_names(last, separator="_")
    assert list(found.values()) == pytest.approx([2001.0, 1999.25, 2000 + 60 / 366, 2000 + 335 / 366], abs=1e-12)
    assert found.rule.startswith("behind the last '_' of each name: year, or year, month and day")
    assert dates_from_names(last) == found
    ages = ["A/12.5", "B/-300"]
    assert dates_from_names(ages) == {"A/12.5": 12.5, "B/-300": -300.0}
    assert dates_from_names(ages).rule == "behind the last '/' of each name: number of years"
    assert dates_from_names(["A_5", "B_7"], "_") == {"A_5": 5.0, "B_7": 7.0}
    assert dates_from_names([]) == {}


def test_the_order_of_day_and_month_is_that_of_all_names(tmp_path):
    names = ["A_04/06/2014", "B_26/05/2014"]
    found = dates_from_names(names)
    assert found == {names[0]: years(2014, 6, 4), names[1]: years(2014, 5, 26)}
    assert found.rule == "at the end of each name: day, month and year, as '26/05/2014' shows"
    names = ["A_04-06-2014", "B_05-26-2014"]
    found = dates_from_names(names)
    assert found == {names[0]: years(2014, 4, 6), names[1]: years(2014, 5, 26)}
    assert found.rule == "at the end of each name: month, day and year, as '05-26-2014' shows"
    with pytest.raises(DataError, match=r"'A_04\.06\.2014': in '04\.06\.2014' the day .* date_format=\"%d\.%m\.%Y\""):
        dates_from_names(["C_05.05.2013", "A_04.06.2014"])
    with pytest.raises(
        DataError, match="'B_26/05/2014': in '26/05/2014' the day is first, but in '05/27/2014' of .*'A_05"
    ):
        dates_from_names(["A_05/27/2014", "B_26/05/2014"])
    path = tmp_path / "dates.tsv"
    path.write_text("A\t04/06/2014\nB\t26/05/2014\n")
    assert dates_from_file(path) == {"A": years(2014, 6, 4), "B": years(2014, 5, 26)}
    assert dates_from_file(path).rule == "in the second column: day, month and year, as '26/05/2014' shows"
    path.write_text("A\t04/06/2014\n")
    with pytest.raises(DataError, match=r"dates\.tsv, line 1: in '04/06/2014' the day cannot be told.*Remedy"):
        dates_from_file(path)
    assert dates_from_file(path, date_format="%m/%d/%Y") == {"A": years(2014, 4, 6)}


GIVEN = {
    "%d/%m/%Y": ("04/06/2014", (2014, 6, 4)),
    "%m/%d/%Y": ("04/06/2014", (2014, 4, 6)),
    "%Y%m%d": ("20140604", (2014, 6, 4)),
    "%d.%m.%y": ("4.6.14", (2014, 6, 4)),
    "%Y": ("2014", (2014, 1, 1)),
    "%Y-%j": ("2016-366", (2016, 12, 31)),
    "%d %B %Y": ("4 June 2014", (2014, 6, 4)),
    "%b%y": ("Jun14", (2014, 6, 1)),
    "%Y_%m_%d": ("2014_06_04", (2014, 6, 4)),
}


@pytest.mark.parametrize("date_format", GIVEN)
def test_a_format_may_be_given(date_format):
    text, day = GIVEN[date_format]
    for name in (f"A|1999.5|{text}", f"A|{text}|x"):
        found = dates_from_names([name], date_format=date_format)
        assert found == {name: pytest.approx(years(*day), abs=1e-12)} and found.rule.endswith(f": {date_format}")
    assert dates_from_names([f"A|{text}"], "|", date_format=date_format) == {f"A|{text}": years(*day)}


WRONG = {
    "no date": (["A"], {}, "the taxon 'A': 'A' is not a date"),
    "a word": (["A/x"], {}, "the taxon 'A/x': 'x' is not a date"),
    "month 13": (["A/2001-13-01"], {}, "'2001-13-01' is not a date"),
    "29 February": (["A/2001-02-29"], {}, "'2001-02-29' is not a date"),
    "day 32": (["A_32/01/2001"], {}, "'32/01/2001' is not a date"),
    "two above 12": (["A_26/26/2001"], {}, "'26/26/2001' is not a date"),
    "year 0": (["A_0000-01-01"], {}, "'0000-01-01' is not a date"),
    "nothing behind": (["A/"], {}, "'' is not a date"),
    "two digits": (["A_26/05/14"], {}, "is not a date"),
    "unknown day": (["A|2020-03-XX"], {}, "is not a date"),
    "one without": (["A_2001", "B_x"], {}, "the taxon 'B_x': .* is not a date"),
    "several": (["A_2001_2002_x", "B_2003"], {}, "the taxon 'A_2001_2002_x': '2001' and '2002' may be its date"),
    "slashes in some": (
        ["A/HK/1/10/1990", "B/HK/1991"],
        {},
        "'1/10/1990' of 'A/HK/1/10/1990' and '1991' of 'B/HK/1991'",
    ),
    "a format that does not fit": (["A_2001"], {"date_format": "%d/%m/%Y"}, "'A_2001' is not a date"),
    "a day that is not there": (
        ["A_30/02/2001"],
        {"date_format": "%d/%m/%Y"},
        "'30/02/2001' is not a date in the format",
    ),
    "a separator that does not fit": (["A_2001"], {"separator": "|"}, "'A_2001' is not a date"),
    "a text": ("A/2000", {}, "sequence of names"),
    "an empty separator": (["A/2000"], {"separator": ""}, "sequence of names"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_dates(case):
    names, settings, message = WRONG[case]
    with pytest.raises(DataError, match=message) as error:
        dates_from_names(names, **settings)
    assert "Remedy" in str(error.value)


@pytest.mark.parametrize("date_format", ["%d/%m", "%H:%M %Y", "", 3, "%", "Y", "%Y%%"])
def test_wrong_formats(date_format, tmp_path):
    with pytest.raises(SettingsError, match="date_format=.*is no format.*Remedy"):
        dates_from_names(["A_2001"], date_format=date_format)
    (tmp_path / "dates").write_text("A,2001\n")
    with pytest.raises(SettingsError, match="date_format=.*is no format.*Remedy"):
        dates_from_file(tmp_path / "dates", date_format=date_format)


def test_dates_in_files(tmp_path):
    path = tmp_path / "dates.csv"
    path.write_text("name,date\nA,2010\n\nB,2009-01-01\nC,-12.5\nD,1e3\n")
    assert dates_from_file(path) == {"A": 2010.0, "B": 2009.0, "C": -12.5, "D": 1000.0}
    path.write_text("A,May-2010\n")
    assert dates_from_file(path) == {"A": years(2010, 5)}
    for text, message in (
        ("A\t2010\nA\t2011\n", "line 2: the taxon 'A' occurs twice"),
        ("A\t2010\nB\t2010\tx\n", "line 2: 3 columns"),
        ("A\t2010\nB\tearly\n", "line 2: 'early' is not a date"),
        ("A\t2010\nB\tnan\n", "line 2: 'nan' is not a date"),
        ("A\t2010\nB\t30-Feb-2010\n", "line 2: '30-Feb-2010' is not a date"),
        ("", "the file is empty"),
    ):
        path.write_text(text)
        with pytest.raises(DataError, match=f"{message}.*Remedy"):
            dates_from_file(path)
    with pytest.raises(DataError, match="no such file"):
        dates_from_file(tmp_path / "nothing.csv")


def test_dates_are_a_dictionary_that_keeps_its_rule():
    dates = dates_from_names(["A_2001", "B_2002.5", "C_1999"])
    assert isinstance(dates, TipDates) and isinstance(dates, dict)
    for other in (copy.copy(dates), pickle.loads(pickle.dumps(dates))):
        assert other == dates and other.rule == dates.rule == "at the end of each name: year"
    assert DatedTopology.of("((A_2001,B_2002.5),C_1999);", dates=dates).tip_heights.tolist() == [1.5, 0.0, 3.5]
