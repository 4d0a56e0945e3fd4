import sys
from pathlib import Path

# The helper module of this folder; pytest's importlib mode puts no test folder on the path.
sys.path.insert(0, str(Path(__file__).parent))
