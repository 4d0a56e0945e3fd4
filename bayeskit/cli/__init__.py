"""The command line: ``bayeskit evidence``, ``trees``, ``compare``, ``sbn``, ``vi``, ``run``, ``exam`` and ``list``."""

from bayeskit.cli._application import add_command, app
from bayeskit.cli._evidence import evidence
from bayeskit.cli._exam import exam
from bayeskit.cli._gallery import list_models, run_model_or_page
from bayeskit.cli._trees import approximate_trees, compare_trees, fit_network, sample_trees

__all__ = ["app", "main"]

for _name, _function in {
    "evidence": evidence,
    "trees": sample_trees,
    "compare": compare_trees,
    "sbn": fit_network,
    "vi": approximate_trees,
    "run": run_model_or_page,
    "exam": exam,
    "list": list_models,
}.items():
    add_command(_name, _function)


def main() -> None:
    """Run the command line."""
    app()
