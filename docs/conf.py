# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Configuration of Sphinx, which makes a site of these pages and of the docstrings: `make docs`.

The pages are written for readers on a git host; what only the site needs is added here.
"""

import importlib.util
import pathlib
import re

from docutils import nodes
from docutils.utils.math import latex2mathml

import dice_tf

project = "dice_tf"
author = "The dice_tf Authors"
copyright = "2026, The dice_tf Authors"
version = release = dice_tf.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
myst_enable_extensions = ["dollarmath"]
# Anchors of headings and blocks of formulas as git hosts have them.
myst_heading_anchors = 4
myst_fence_as_directive = ["math"]

# What is returned is described in words, not by names of types.
napoleon_use_rtype = False
napoleon_use_ivar = True
# `code` in docstrings is code, as in the pages.
default_role = "literal"
autodoc_member_order = "bysource"
add_module_names = False
python_use_unqualified_type_names = True
# One argument per line where a signature is long.
python_maximum_signature_line_length = 80

# Dashes only: quotes in messages are to be searched for, and copied.
smartquotes_action = "D"
html_theme = "furo"
# A line of code of 100 characters fits.
_small = {"code-font-size": "var(--font-size--small--3)"}
html_theme_options = {"light_css_variables": _small, "dark_css_variables": _small}
html_title = f"dice_tf {release}"
html_show_sourcelink = False
html_copy_source = False
html_math_renderer = "mathml"

# A reference that leads nowhere is a warning, and `make docs` has no warnings.
nitpicky = True
nitpick_ignore_regex = [
    # Of other packages, and no site of theirs is asked: the build needs no network.
    (r"py:.*", r"(keras|tf|tensorflow|tensorflow_privacy|dp_query|dp_accounting|np|numpy)\..*"),
    (r"py:.*", r"(keras_tuner|os|pathlib)\..*"),
    (r"py:.*", r"(int|float|str|bool|tuple|object|optional|ValueError|ImportError|Figure)"),
    # Of annotations: what every sampler is, and Python's own abstract classes.
    (r"py:.*", r"(dice_tf\.sampling\.)?(owners\.)?(Sampling|Owners|Self)|collections\.abc\..*"),
    (r"py:.*", r"(dice_tf\.accounting\.random_allocation\.)?AllocatedRound"),
    (r"py:.*", r"(dice_tf\.mechanism\.clipping\.)?Clip"),
]

# The root of the sources is that of the repository, so that links work here as on a git host.
root_doc = "docs/index"
include_patterns = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/*.md", "docs/**"]
exclude_patterns = [".*", "out", "build", "dist", "docs/figures"]
suppress_warnings = []
if importlib.util.find_spec("tensorflow_privacy") is None:
    # Python 3.12 and later: dice_tf.tf_privacy cannot be imported there.
    exclude_patterns.append("docs/api/tf_privacy.rst")
    suppress_warnings.append("toc.excluded")

# A git host shows directives as text, so the contents of the site are not in index.md.
CONTENTS = {
    "Start": ["README <../README>"],
    "Learn": ["differential_privacy", "Error feedback in five minutes <error_feedback>"],
    "Do": [
        "user_guide",
        "choosing_the_clip",
        "adaptive_clipping",
        "random_allocation",
        "your_data_on_disk",
        "Private tables <tables>",
        "Units <units>",
        "Recipes <recipes>",
        "private_search",
        "What works, and what is refused <features>",
        "Auditing <auditing>",
        "Migrating <migrating>",
        "Saving and resuming <saving>",
        "Several devices <scaling>",
        "gpu",
        "Troubleshooting <troubleshooting>",
    ],
    "Check": [
        "Privacy <privacy>",
        "groups",
        "Results <results>",
        "What it costs, and other packages <comparison>",
        "Benchmarks <../benchmarks/README>",
    ],
    "API": [
        "api/plan",
        "api/optimizers",
        "api/sampling",
        "api/training",
        "api/accounting",
        "Layers of one's own <api/layers>",
        "api/auditing",
        "api/errors",
        "api/tf_privacy",
    ],
    "Project": ["../CONTRIBUTING", "../CHANGELOG"],
}


# A character that no docstring has.
_COLON = "\ue000"


def add_contents(app, name, source):
    """Adds the tables of contents to the first page."""
    del app
    if name == root_doc:
        for caption, pages in CONTENTS.items():
            options = f":hidden:\n:caption: {caption}\n"
            source[0] += f"\n```{{toctree}}\n{options}\n" + "\n".join(pages) + "\n```\n"


def to_sphinx_markup(app, what, name, item, options, lines):
    r"""Turns \(formulas\), \[displayed formulas\] and `code` of docstrings into Sphinx' markup."""
    del app, name, item, options
    text = "\n".join(lines)

    def displayed(match):
        indent, formula = match[1], " ".join(match[2].split())
        return f"\n{indent}.. math::\n\n{indent}    {formula}\n\n{indent}"

    text = re.sub(r"^( *)\\\[(.*?)\\\] *", displayed, text, flags=re.DOTALL | re.MULTILINE)
    inline = lambda match: f"\\ :math:`{' '.join(match[1].split())}`\\ "
    text = re.sub(r"\\\((.*?)\\\)", inline, text, flags=re.DOTALL)
    # Code that a letter follows, as in "`Dense`s".
    text = re.sub(r"(?<![\w`])(`[^`\n]+`)(?=\w)", r"\1\\ ", text)
    lines[:] = text.split("\n")
    if what == "property":
        # Napoleon would take the first line, up to a colon, for a type.
        lines[0] = lines[0].replace(":", _COLON)


def restore_colons(app, what, name, item, options, lines):
    """Undoes what `to_sphinx_markup` hid from napoleon."""
    del app, what, name, item, options
    lines[:] = [line.replace(_COLON, ":") for line in lines]


def visit_math(self, node):
    """Writes a formula as MathML, which browsers draw themselves: no script, no server."""
    block = isinstance(node, nodes.math_block)
    formula = node.astext().replace(r"\dots", r"\ldots")
    self.body.append(latex2mathml.tex2mathml(formula, as_block=block))
    raise nodes.SkipNode


def lead_to_first_page(app, exception):
    """Writes an index.html at the top of the site."""
    if exception is None:
        page = f'<meta http-equiv="refresh" content="0; url={root_doc}.html">\n'
        (pathlib.Path(app.outdir) / "index.html").write_text(page, encoding="utf-8")


def setup(app):
    """Registers what this file adds to Sphinx."""
    app.connect("source-read", add_contents)
    # Before napoleon, which looks for sections.
    app.connect("autodoc-process-docstring", to_sphinx_markup, priority=400)
    app.connect("autodoc-process-docstring", restore_colons, priority=600)
    app.connect("build-finished", lead_to_first_page)
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_math, None))
