"""The documentation's site, by Sphinx: pages in Markdown, the notebooks with their stored outputs, and the reference.

``make docs`` builds it: ``python -m sphinx -c docs . docs/_build/html``. Nothing is
downloaded: styles and the index of the search are part of the site, which works from a folder without a server.
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
# The root of the sources is the repository's, so that links between pages, notebooks and other files of the repository
# are the same on the site and where its files are looked at.
root_doc = "docs/index"
include_patterns = [
    "docs/**",
    "notebooks/*.ipynb",
    "tests/benchmarks/README.md",
    "tests/hardware/README.md",
    "C*.md",
]
exclude_patterns = [".*", "docs/_*", "nblaunch", "artifacts", "binder", "build", "dist"]

# Pages in Markdown. A link to a heading or a file that is not there is a warning, and warnings fail the build.
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
nb_execution_mode = "off"
# What the notebooks show without a script; the state of live widgets is not stored in them.
nb_mime_priority_overrides = [("html", "text/html", 0), ("html", "text/plain", 50)]
nb_merge_streams = True

# The reference is made of docstrings. Types stand in the signatures alone.
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
