"""The command line: ``bayeskit sample``, ``evidence``, ``compare``, ``loo``, ``trees``, ``run`` and others."""

from bayeskit.cli._application import add_command, app
from bayeskit.cli._compare import compare_models_or_trees
from bayeskit.cli._evidence import evidence
from bayeskit.cli._exam import exam
from bayeskit.cli._gallery import list_models, run_model_or_page
from bayeskit.cli._own_models import loo_own, sample_own
from bayeskit.cli._trees import approximate_trees, fit_network, sample_trees

__all__ = ["app", "main"]

add_command("sample", sample_own)
add_command("evidence", evidence)
add_command("compare", compare_models_or_trees)
add_command("loo", loo_own)
add_command("trees", sample_trees)
add_command("sbn", fit_network)
add_command("vi", approximate_trees)
add_command("run", run_model_or_page)
add_command("exam", exam)
add_command("list", list_models)


def main() -> None:
    """Run the command line."""
    app()
