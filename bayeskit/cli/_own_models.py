"""Models in a user's file, with data of a CSV file: ``bayeskit sample``, ``loo``, and parts of others."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from bayeskit._core.inputs import unknown_name
from bayeskit._ctrl_c import give_back
from bayeskit.cli._folders import file_digest, opened, say_where
from bayeskit.cli._options import POSTERIOR, Acceptance, Force, Out, Quiet, Seed, numeric
from bayeskit.cli._tables import new_console, new_table, print_files, print_summary, value_and_error
from bayeskit.errors import DataError, ModelError, SettingsError

if TYPE_CHECKING:
    import pandas as pd

    from bayeskit import Draws, Target

Model = Annotated[str, typer.Argument(help="A Python file and a Pyro model in it, as model.py:model.", metavar="MODEL")]
Models = Annotated[list[str], typer.Argument(help="Models in Python files, as model.py:model.", metavar="MODEL...")]
Data = Annotated[
    Path | None,
    typer.Option(
        "--data",
        help="CSV file (.tsv: tabs) whose columns are the model's arguments of the same names.",
        metavar="FILE",
    ),
]
_Chains = Annotated[int, numeric("4", "Chains.", POSTERIOR, min=1)]
_Warmup = Annotated[int, numeric("500", "Warm-up iterations of each chain.", POSTERIOR, min=20)]
_Samples = Annotated[int, numeric("1000", "Draws of each chain.", POSTERIOR, min=4)]
#: Names of an argument that is the whole table.
_WHOLE = ("data", "frame", "df")


def is_own(name: str) -> bool:
    """Tell the name of a model in a file, ``path.py`` or ``path.py:name``, from that of the gallery."""
    return _split(name)[0].endswith(".py")


def _split(text: str) -> tuple[str, str]:
    path, colon, name = text.rpartition(":")
    return (path, name) if colon and path.endswith(".py") else (text, "model")


def what_runs(models: Sequence[str], data: Path | None) -> dict[str, Any]:
    """Return what identifies models and their data, for the settings of a folder; a typed error without a file."""
    found: dict[str, Any] = {}
    for text in models:
        path = Path(_split(text)[0])
        if not path.is_file():
            raise SettingsError(f"{path}: there is no such file")
        found[text] = file_digest(path)
    if data is not None:
        if not data.is_file():
            raise DataError(f"{data}: there is no such file")
        found[data.name] = file_digest(data)
    return found


def target_of(text: str, data: Path | None, seed: int = 0) -> Target:
    """Return the target of a model in a file, whose arguments are the columns of a table."""
    from bayeskit import Target

    model = _loaded(text)
    if isinstance(model, Target):
        if data is not None:
            raise SettingsError(f"{text} is a Target, which has its data; leave --data out")
        return model
    arguments = _arguments(model, text, data)
    if taken := (inspect.signature(Target.from_pyro).parameters.keys() - {"args", "kwargs"}) & arguments.keys():
        name = min(taken)
        raise SettingsError(f"the argument {name!r} of {text} has the name of a setting; rename it, and the column")
    target = Target.from_pyro(model, seed=seed, **arguments)
    for name in target.named_data()[0]:
        if getattr(arguments.get(name), "dtype", "") == "category" and name not in target.whole_numbers():
            raise DataError(f"the column {name!r} holds texts, and the site of this name has a continuous distribution")
    return target


def _loaded(text: str) -> Any:
    """Run a user's file, as Python would, and return what has the name in it."""
    given, name = _split(text)
    path = Path(given).resolve()
    spec = importlib.util.spec_from_file_location(f"_bayeskit_model_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise SettingsError(f"{path}: this is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # as Python does for a script; a model may import more when it runs
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        from bayeskit._core.functions_of_users import words_of

        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        place = f", line {lines[-1]}" if lines else ""
        raise ModelError(f"{given}{place}: {words_of(error)}") from error
    if not hasattr(module, name):
        functions = [
            n for n, x in vars(module).items() if callable(x) and getattr(x, "__module__", "") == module.__name__
        ]
        raise unknown_name("model", name, functions)
    model = getattr(module, name)
    if inspect.isclass(model):
        raise ModelError(f"{name} in {given} is a class; name an instance of it")
    if not callable(model) and not hasattr(model, "log_density"):
        raise ModelError(f"{name} in {given} is a {type(model).__name__}, not a Pyro model")
    return model


def _arguments(model: Callable[..., Any], text: str, data: Path | None) -> dict[str, Any]:
    """Return the arguments of a model: columns of its names, or the whole table."""
    function = getattr(model, "forward", model)  # of a module; what it is called by takes anything
    named = [
        p for p in inspect.signature(function).parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    needed = [p.name for p in named if p.default is p.empty]
    if data is None:
        if needed:
            raise SettingsError(f"{text} takes {', '.join(needed)}; pass --data FILE with columns of these names")
        return {}
    table = _table(data)
    found = {p.name: _column(table, p.name, data) for p in named if p.name in table.columns}
    found |= {p.name: table for p in named if p.name in _WHOLE and p.name not in table.columns}
    if missing := [name for name in needed if name not in found]:
        raise DataError(
            f"{text} takes {missing[0]!r}, which is no column of {data.name}; its columns are "
            f"{', '.join(map(str, table.columns))}. An argument called 'data' is the whole table"
        )
    if not found:
        raise SettingsError(f"{text} takes no argument that {data.name} has; leave --data out, or name its columns")
    return found


def _column(table: pd.DataFrame, name: str, path: Path) -> pd.Series:
    """Return a column of numbers or of categories; DataError for one that holds numbers and texts."""
    import pandas as pd

    column = table[name]
    if isinstance(column.dtype, pd.CategoricalDtype) or pd.api.types.is_numeric_dtype(column):
        return column
    texts = pd.to_numeric(column, errors="coerce").isna() & column.notna()
    row = int(texts.to_numpy().argmax())
    raise DataError(
        f"{path}: column {name!r} holds numbers and texts, such as {column[row]!r} in row {row + 1}; leave the cell of "
        "a missing number empty, or write texts in all rows"
    )


def _table(path: Path) -> pd.DataFrame:
    """Return a table of a text file: columns of texts as categories, those with numbers and texts as they are."""
    import pandas as pd

    between = "\t" if path.suffix in (".tsv", ".tab") else ","
    try:
        header = pd.read_csv(path, sep=between, header=None, nrows=2, dtype=str).iloc[0].astype(str).str.strip()
        table = pd.read_csv(path, sep=between)
    except (ValueError, OSError) as error:  # errors of pandas' parser, and of decoding, are values
        raise DataError(f"{path} cannot be read as a table: {error}") from error
    if header.duplicated().any():
        raise DataError(f"{path} has two columns called {header[header.duplicated()].iloc[0]!r}")
    table.columns = list(header)
    others = [name for name in table.columns if not pd.api.types.is_numeric_dtype(table[name])]
    texts = [name for name in others if not pd.to_numeric(table[name], errors="coerce").notna().any()]
    return table.astype(dict.fromkeys(texts, "category"))


def sample_own(
    model: Model,
    data: Data = None,
    seed: Seed = 0,
    out: Out = None,
    force: Force = False,
    quiet: Quiet = False,
    chains: _Chains = 4,
    warmup: _Warmup = 500,
    samples: _Samples = 1000,
    target_acceptance: Acceptance = None,
) -> None:
    """Draw from the posterior of a Pyro model in a file of yours, with a table's columns as its arguments.

    Writes summary.csv, posterior.nc and report.html. A killed run resumes with the same command, and a finished one is
    not repeated.
    """
    numbers = _run_numbers(chains, warmup, samples, seed, target_acceptance)
    folder = opened("sample", stem_of(model), out, force, quiet, what_runs([model], data) | numbers)
    if folder is None:
        return
    from bayeskit.report import posterior_summary

    give_back()
    target = target_of(model, data, seed)
    say_where(folder, out, quiet)
    draws = _drawn(target, model, data, folder.path, numbers, quiet)
    summary = posterior_summary(draws)
    worst = f"{summary['ess'].min():.0f} effective draws or more, r-hat at most {summary['r_hat'].max():.3f}"
    folder.finish(f"{model}: {draws.num_chains} chains of {draws.num_draws} draws, {worst}")
    if not quiet:
        print_summary(summary, model)
        print_files(folder.path, folder.files())


def _run_numbers(chains: int, warmup: int, samples: int, seed: int, target_acceptance: float | None) -> dict[str, Any]:
    """Return the settings of a posterior run, those that were not given left out."""
    numbers = {"num_chains": chains, "num_warmup": warmup, "num_samples": samples, "seed": seed}
    return numbers | ({} if target_acceptance is None else {"target_acceptance": target_acceptance})


def stem_of(text: str) -> str:
    """Return the name of a folder for a model in a file."""
    path, name = _split(text)
    return f"{Path(path).stem}-{name}"


def _drawn(target: Target, text: str, data: Path | None, folder: Path, numbers: dict[str, Any], quiet: bool) -> Draws:
    from bayeskit.workflows import posterior_in_folder

    settings = {"model": text} | ({} if data is None else {"data": data.name})
    title = f"Posterior of {text}"
    return posterior_in_folder(target, folder, title=title, settings=settings, progress=not quiet, **numbers)


def loo_own(
    models: Models,
    data: Data = None,
    by: Annotated[str | None, typer.Option(help="Plate whose members are left out together.")] = None,
    seed: Seed = 0,
    out: Out = None,
    force: Force = False,
    quiet: Quiet = False,
    chains: _Chains = 4,
    warmup: _Warmup = 500,
    samples: _Samples = 1000,
    target_acceptance: Acceptance = None,
) -> None:
    """Leave-one-out cross-validation of models in files of yours, and their differences.

    Writes loo.csv, and for each model a folder with its posterior and the log predictive density of each datum.
    """
    if len({stem_of(model) for model in models}) < len(models):
        raise SettingsError("two of the models have the same name; name each once")
    numbers = _run_numbers(chains, warmup, samples, seed, target_acceptance)
    name = "-".join(stem_of(model) for model in models)
    folder = opened("loo", name, out, force, quiet, what_runs(models, data) | numbers | {"by": by})
    if folder is None:
        return
    from bayeskit._core.folders import write_csv

    give_back()
    targets = {model: target_of(model, data, seed) for model in models}
    for target in targets.values():
        plates = {name for along in target.dimensions().values() for name in along if name is not None}
        if by is not None and by not in plates:
            raise unknown_name("plate", by, sorted(plates))
    say_where(folder, out, quiet)
    scores = {}
    for model, target in targets.items():
        place = folder.path / stem_of(model)
        scores[model] = _drawn(target, model, data, place, numbers, quiet).loo(by=by)
        write_csv(place / "loo.csv", scores[model].to_pandas(), index=False, float_format="%.8g")
    best = max(scores, key=lambda model: scores[model].elpd)
    table = _differences(scores, best)
    write_csv(folder.path / "loo.csv", table, index=False, float_format="%.8g")
    folder.finish(f"{best} predicts best, elpd {scores[best].elpd:.2f} +- {scores[best].standard_error:.2f}")
    if quiet:
        return
    console = new_console()
    shown = new_table("leave-one-out cross-validation", "model", "elpd", "error", "p_loo", "difference", "error", "")
    for row in table.itertuples():
        elpd, difference = value_and_error(row.elpd, row.standard_error), value_and_error(row.difference, row.its_error)
        shown.add_row(Text(row.model), *elpd, f"{row.p_loo:.1f}", *difference, "" if row.trusted else "not trusted")
    console.print(shown)
    for model, score in scores.items():
        for warning in score.warnings:
            console.print(Text(f"{model}: {warning}", style="yellow"), soft_wrap=True)
    print_files(folder.path, folder.files())


def _differences(scores: dict[str, Any], best: str) -> Any:
    """Return a row for each model, the best first: its score, and its difference from the best with the error."""
    import pandas as pd

    rows = []
    for model, score in sorted(scores.items(), key=lambda pair: -pair[1].elpd):
        difference, error = score.difference(scores[best]) if model != best else (0.0, 0.0)
        facts = {"model": model, "elpd": score.elpd, "standard_error": score.standard_error, "p_loo": score.p_loo}
        rows.append(facts | {"difference": difference, "its_error": error, "trusted": score.trusted})
    return pd.DataFrame(rows)


def compare_own(
    models: Sequence[str],
    data: Path | None,
    method: str,
    seed: int,
    out: Path | None,
    force: bool,
    quiet: bool,
    jobs: int,
) -> None:
    """Estimate the evidence of models in files, and print Bayes factors and probabilities."""
    if len(models) < 2:
        raise SettingsError("a comparison needs two models; pass them one after the other, as a.py:model b.py:model")
    if len(set(models)) < len(models):
        raise SettingsError("two of the models have the same name; name each once")
    settings = what_runs(models, data) | {"method": method, "seed": seed}
    folder = opened("compare", "-".join(map(stem_of, models)), out, force, quiet, settings)
    if folder is None:
        return
    from bayeskit import compare_models

    give_back()
    for model in models:
        target_of(model, data, seed)  # what is wrong with one of them is said before any is run
    say_where(folder, out, quiet)
    built = {model: functools.partial(target_of, model, data, seed) for model in models}
    tasks = folder.path / "checkpoint"
    found = compare_models(built, method, seed=seed, num_jobs=jobs, checkpoint=tasks, progress=not quiet)
    found.to_csv(folder.path / "models.csv")
    for file in [*tasks.glob("task-*.safetensors"), tasks / "tasks.json"]:
        file.unlink(missing_ok=True)
    with suppress(OSError):
        tasks.rmdir()  # unless it holds files of others
    folder.finish(f"{found.best} is the most probable, by {method}")
    if quiet:
        return
    console = new_console()
    table = new_table(f"evidence by {method}", "model", "log evidence", "error", "probability", "error", "")
    for model, (probability, error) in found.posterior_probabilities.items():
        estimate = found[model]
        value = value_and_error(estimate.log_evidence, estimate.standard_error)
        trusted = "" if estimate.trusted else "not trusted"
        table.add_row(Text(model), *value, f"{probability:.4f}", f"{error:.1g}", trusted)
    console.print(table)
    print_files(folder.path, folder.files())
