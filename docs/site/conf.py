# SPDX-License-Identifier: Apache-2.0
# Sphinx: the reference of the C++ and C headers (Doxygen's XML, by breathe) and of the Python package (its docstrings).
import os
import pathlib
import sys

root = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(root / "python"))

project = "bifolio"
copyright = "the bifolio authors, Apache-2.0"
version = release = os.environ["BIFOLIO_VERSION"]
extensions = ["breathe", "sphinx.ext.autodoc"]
breathe_projects = {"bifolio": os.environ["BIFOLIO_DOXYGEN_XML"]}
breathe_default_project = "bifolio"
breathe_domain_by_extension = {"hpp": "cpp", "h": "c"}
# The compiled half of the package is not needed to read docstrings, nor are the frameworks.
autodoc_mock_imports = ["bifolio._core", "torch", "transformers"]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
html_theme = "alabaster"
html_theme_options = {"description": "Paged KV cache and attention to link into your own engine", "page_width": "1200px",
                      "sidebar_width": "260px"}
html_show_sourcelink = False
