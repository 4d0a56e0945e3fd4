import re
from pathlib import Path

import bayeskit as bk

README = Path(__file__).parents[2] / "README.md"


def test_the_example_of_the_readme_runs(capsys):
    (block,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    scope = {}
    exec(block, scope)
    assert isinstance(scope["draws"], bk.Draws)
    assert scope["estimate"].trusted
    assert "bridge_sampling: log evidence" in capsys.readouterr().out
