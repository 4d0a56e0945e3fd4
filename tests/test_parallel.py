import pytest
import torch

from bayeskit.errors import SettingsError
from bayeskit.parallel import map_tasks


def threads(_):
    return torch.get_num_threads()


def test_order_is_kept_and_each_task_has_one_thread():
    assert map_tasks(abs, [-3, 2, -1], progress=False) == [3, 2, 1]
    assert map_tasks(threads, [0, 1], num_jobs=2, progress=False) == [1, 1]


def test_an_error_of_a_task_reaches_the_caller():
    with pytest.raises(TypeError):
        map_tasks(abs, ["x"], progress=False)
    with pytest.raises(SettingsError, match="num_jobs"):
        map_tasks(abs, [1], num_jobs=0)
