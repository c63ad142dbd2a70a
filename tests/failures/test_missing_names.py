"""Errors of fresh workers that miss a variable of the notebook, because the function names it only in a string."""

from __future__ import annotations

from tests.kernels import Kernel

LAUNCH = "nblaunch.notebook_launcher({}, num_processes=2, start_method='forkserver', dashboard='none')"


def test_a_variable_that_only_a_string_names_is_explained(kernel: Kernel) -> None:
    kernel.run(
        "import nblaunch\n"
        "threshold, lr = 0.5, 0.1\n"
        "def undefined(): return eval('threshold * 2')\n"
        "def look_up(names): return names['threshold']\n"
        "def missing(): return look_up(globals())\n"
        "def of_dictionary(): return look_up({})\n"
        "def typo(): return thresold"
    )
    for function, error in (("undefined", "NameError"), ("missing", "KeyError")):
        shown = kernel.run(LAUNCH.format(function), raises=error).raised.text
        assert "notebook has a variable threshold" in " ".join(shown.split())
    for function, error in (("of_dictionary", "KeyError"), ("typo", "NameError")):
        assert "has a variable" not in kernel.run(LAUNCH.format(function), raises=error).raised.text
