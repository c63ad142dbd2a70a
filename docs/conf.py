"""Sphinx's configuration for the documentation: Markdown pages, the notebooks with their stored outputs, the reference.

``make docs`` builds it with ``python -m sphinx -c docs . docs/_build/html``. The site needs no downloads and no server:
it contains its styles and its search index.
"""

from __future__ import annotations

import sys
from pathlib import Path

import nblaunch

sys.path.insert(0, str(Path(__file__).parent / "_extensions"))

project = "nblaunch"
author = "the nblaunch contributors"
version = release = nblaunch.__version__
language = "en"

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "myst_nb",
    "sphinx_copybutton",
    "from_source",
]
# The source folder is the repository's root, so that links between pages, notebooks and other files work both on the
# site and in the repository.
root_doc = "docs/index"
include_patterns = [
    "docs/**",
    "notebooks/*.ipynb",
    "tests/benchmarks/README.md",
    "tests/hardware/README.md",
    "C*.md",
]
exclude_patterns = [".*", "docs/_*", "nblaunch", "artifacts", "binder", "build", "dist"]

# Markdown pages. A link to a heading or a file that does not exist is a warning, and warnings fail the build.
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
nb_execution_mode = "off"
# Outputs that need no script: the notebooks do not store the state of live widgets.
nb_mime_priority_overrides = [("html", "text/html", 0), ("html", "text/plain", 50)]
nb_merge_streams = True

# The reference is generated from docstrings. Types appear only in signatures.
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
napoleon_google_docstring = True
napoleon_numpy_docstring = False
add_module_names = False

html_show_copyright = False
html_theme = "furo"
html_title = f"nblaunch {version}"
html_static_path = ["_static"]
templates_path = ["_templates"]
html_additional_pages = {"index": "to_index.html"}
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
copybutton_exclude = ".linenos, .gp, .go"
