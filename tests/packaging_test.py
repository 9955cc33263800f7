# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""What is packaged is what is there: version, modules, dependencies, programs."""

import ast
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

import dice_tf
from dice_tf.version import __version__

ROOT = pathlib.Path(__file__).absolute().parents[1]

# Runs setup.py with setuptools.setup replaced by a print of its arguments.
PRINT_SETUP_ARGUMENTS = """
import json, runpy, sys
import setuptools
setuptools.setup = lambda **arguments: print(json.dumps(arguments))
runpy.run_path("setup.py", run_name="__main__")
assert "tensorflow" not in sys.modules, "setup.py imports TensorFlow"
"""

# Distributions whose name is not that of their module.
DISTRIBUTIONS = {"absl": "absl-py", "sklearn": "scikit-learn"}


@pytest.fixture(scope="module")
def setup_arguments():
    run = subprocess.run(
        [sys.executable, "-c", PRINT_SETUP_ARGUMENTS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def sources(folder):
    return sorted((ROOT / folder).rglob("*.py"))


def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def required(requirements):
    """Names of the distributions in a list of requirements."""
    return {canonical(re.match(r"[\w.-]+", requirement)[0]) for requirement in requirements}


def imported(folder):
    """Names of the distributions that the sources under `folder` import."""
    modules = set()
    for source in sources(folder):
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                modules |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                modules.add(node.module.split(".")[0])
    own = {source.stem for each in ("examples", "tests", "benchmarks") for source in sources(each)}
    own |= {"dice_tf", "examples", "tests", "benchmarks"}
    return {
        canonical(DISTRIBUTIONS.get(module, module))
        for module in modules - own - set(sys.stdlib_module_names)
    }


def test_package_comes_from_this_tree():
    package = pathlib.Path(dice_tf.__file__)
    if "TEST_SRCDIR" in os.environ:
        # Bazel links the declared sources there. An installed copy must not
        # stand in for a missing declaration.
        assert package.is_relative_to(os.environ["TEST_SRCDIR"])
    else:
        assert package.resolve().is_relative_to(ROOT.resolve())


def test_version_is_one_number(setup_arguments):
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## (\S+)", changelog, re.MULTILINE)[1]
    assert setup_arguments["version"] == __version__ == newest


def test_setup_names_no_version_of_its_own():
    assert f'"{__version__}"' not in (ROOT / "setup.py").read_text(encoding="utf-8")


def test_every_folder_with_sources_is_packaged(setup_arguments):
    folders = {source.parent.relative_to(ROOT) for source in sources("dice_tf")}
    assert set(setup_arguments["packages"]) == {".".join(folder.parts) for folder in folders}


@pytest.mark.parametrize(
    "folder, extra",
    [("dice_tf", None), ("examples", "examples"), ("tests", "test"), ("benchmarks", "benchmarks")],
)
def test_every_import_is_a_declared_dependency(setup_arguments, folder, extra):
    declared = required(setup_arguments["install_requires"])
    if extra:
        declared |= required(setup_arguments["extras_require"][extra])
    assert imported(folder) <= declared


def test_every_dependency_has_a_reason():
    lines = (ROOT / "setup.py").read_text(encoding="utf-8").splitlines()
    requirements = [i for i, line in enumerate(lines) if re.match(r"    [\"'][a-z_-]+[<>=]", line)]
    assert len(requirements) > 10
    assert [lines[i] for i in requirements if not lines[i - 1].startswith("    # ")] == []


def test_every_requirement_is_bounded_below(setup_arguments):
    listed = [setup_arguments["install_requires"], *setup_arguments["extras_require"].values()]
    unbounded = [r for each in listed for r in each if not re.match(r"[\w.-]+[>=]=", r)]
    assert unbounded == []


def test_every_program_is_a_bazel_target():
    text = (ROOT / "examples" / "BUILD").read_text(encoding="utf-8")
    programs = set(re.findall(r'^    "(\w+\.py)",$', text, re.MULTILINE))
    runnable = {s.name for s in sources("examples") if "__main__" in s.read_text(encoding="utf-8")}
    assert programs == runnable


def test_every_test_can_be_run_by_bazel():
    # Bazel runs a test as a program; without this line it would pass unrun.
    ending = re.compile(
        r'if __name__ == "__main__":\s+raise SystemExit\(pytest\.main\(\[__file__\]\)\)\n\Z'
    )
    tests = sorted((ROOT / "tests").glob("*_test.py"))
    assert tests
    assert [t.name for t in tests if not ending.search(t.read_text(encoding="utf-8"))] == []


def test_every_source_carries_its_license():
    header = "# Copyright 2026 The dice_tf Authors.\n# SPDX-License-Identifier: Apache-2.0\n"
    files = [s for each in ("dice_tf", "examples", "tests", "benchmarks") for s in sources(each)]
    assert files
    assert [f.name for f in files if not f.read_text(encoding="utf-8").startswith(header)] == []


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
