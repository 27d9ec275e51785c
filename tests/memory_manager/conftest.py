import pytest

pytest.register_assert_rewrite("tests.memory_manager.side_by_side")
