# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""What is packaged is what is there: version, modules, dependencies, programs."""

import ast
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest
import yaml

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
DISTRIBUTIONS = {"absl": "absl-py", "sklearn": "scikit-learn", "yaml": "pyyaml"}

# Builds both distributions without fetching anything, in the current folder.
BUILD = """
from setuptools import build_meta
build_meta.build_sdist("dist")
build_meta.build_wheel("dist")
"""
PACKAGING = ["CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "MANIFEST.in",
             "Makefile", "README.md", "pyproject.toml", "setup.py"]  # fmt: skip


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


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """Names of the files in the wheel and in the source distribution, and what is in them."""
    folder = tmp_path_factory.mktemp("tree")
    for name in PACKAGING:
        shutil.copy(ROOT / name, folder)
    junk = shutil.ignore_patterns("__pycache__", "out")
    for name in ("dice_tf", "examples", "tests", "benchmarks", "docs"):
        if (ROOT / name).exists():  # Bazel brings along what is declared.
            shutil.copytree(ROOT / name, folder / name, ignore=junk)
    (folder / "dice_tf" / "__pycache__").mkdir()
    (folder / "dice_tf" / "__pycache__" / "version.cpython-311.pyc").touch()
    run = subprocess.run(
        [sys.executable, "-c", BUILD], cwd=folder, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
    (wheel,), (archive,) = ((folder / "dist").glob(f"*.{end}") for end in ("whl", "tar.gz"))
    with zipfile.ZipFile(wheel) as file:
        in_wheel = {name: file.read(name) for name in file.namelist()}
    with tarfile.open(archive) as file:
        in_archive = {
            member.name.partition("/")[2]: file.extractfile(member).read()
            for member in file
            if member.isfile()
        }
    return wheel.name, in_wheel, archive.name, in_archive


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
    # The package draws with the one and searches the hypermodels of the other. It imports them
    # only there, with an error that says so if they are missing.
    optional = {"matplotlib", "keras-tuner"} if folder == "dice_tf" else set()
    assert optional <= set().union(*map(required, setup_arguments["extras_require"].values()))
    assert imported(folder) - optional <= declared


def test_every_dependency_has_a_reason():
    lines = (ROOT / "setup.py").read_text(encoding="utf-8").splitlines()
    requirements = [i for i, line in enumerate(lines) if re.match(r"    [\"'][a-z_-]+[<>=]", line)]
    assert len(requirements) > 10
    assert [lines[i] for i in requirements if not lines[i - 1].startswith("    # ")] == []


def test_every_requirement_is_bounded_below(setup_arguments):
    listed = [setup_arguments["install_requires"], *setup_arguments["extras_require"].values()]
    unbounded = [r for each in listed for r in each if not re.match(r"[\w.-]+[>=]=", r)]
    assert unbounded == []


def test_wheel_has_the_package_and_nothing_else(setup_arguments, distributions):
    name, files, _, _ = distributions
    assert name == f"dice_tf-{__version__}-py3-none-any.whl"
    package = {f.relative_to(ROOT).as_posix() for f in sources("dice_tf")} | {"dice_tf/py.typed"}
    information = f"dice_tf-{__version__}.dist-info/"
    assert {file for file in files if not file.startswith(information)} == package
    assert all(files[name] == (ROOT / name).read_bytes() for name in package)
    assert any(file.startswith(information) and file.endswith("LICENSE") for file in files)
    metadata = files[f"{information}METADATA"].decode()
    assert f"\nVersion: {__version__}\n" in metadata
    described = re.findall(r"^Requires-Dist: ([\w.-]+)(?!.*extra ==)", metadata, re.MULTILINE)
    assert {canonical(each) for each in described} == required(setup_arguments["install_requires"])
    assert (ROOT / "README.md").read_text(encoding="utf-8").strip() in metadata


def test_source_distribution_has_what_tests_and_docs_need(distributions):
    _, _, name, files = distributions
    # Older releases of setuptools keep the hyphen.
    assert name.replace("dice-tf", "dice_tf") == f"dice_tf-{__version__}.tar.gz"
    folders = ("dice_tf", "examples", "tests", "benchmarks")
    tree = {f.relative_to(ROOT).as_posix() for each in folders for f in sources(each)}
    pages = {f.relative_to(ROOT).as_posix() for f in (ROOT / "docs").glob("*.md")}
    assert tree and pages
    expected = tree | pages | set(PACKAGING) | {"dice_tf/py.typed"}
    assert expected - set(files) == set()
    assert [file for file in files if "__pycache__" in file or file.endswith(".pyc")] == []
    assert all(files[each] == (ROOT / each).read_bytes() for each in expected)


def test_citation_names_this_version_and_the_paper():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    # What the Citation File Format 1.2.0 requires, of the package and of a reference.
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert (citation["cff-version"], citation["type"]) == ("1.2.0", "software")
    assert citation["version"] == __version__ and citation["license"] == "Apache-2.0"
    paper = citation["preferred-citation"]
    assert {"type", "title", "authors"} <= set(paper)
    assert [author["family-names"] for author in paper["authors"]] == ["Zhang", "Bu", "Wu", "Hong"]
    # The same paper as everywhere else.
    assert paper["url"] in (ROOT / "README.md").read_text(encoding="utf-8")


def test_matrix_starts_from_the_lowest_versions_of_setup(setup_arguments):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (script,) = re.findall(r"^LOWEST = \$\(shell (.+)\)$", makefile, re.MULTILINE)
    run = subprocess.run(script, shell=True, cwd=ROOT, capture_output=True, text=True, check=True)
    bounds = [re.match(r"(\w+)>=([\d.]+),", r) for r in setup_arguments["install_requires"]]
    expected = [f"'{b[1]}=={b[2]}.*'" for b in bounds if b and b[1] in ("tensorflow", "keras")]
    assert run.stdout.split() == expected and len(expected) == 2


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
