"""Sphinx configuration; ``make docs`` builds the site into docs/_build/html."""

import logging
import re
import sys
import warnings
from typing import Any

warnings.filterwarnings("ignore")  # of torch and Lightning, while autodoc imports them
logging.getLogger("lightning").setLevel(logging.ERROR)

import lightning_sparse  # noqa: E402

project = "lightning_sparse"
author = "the authors of lightning_sparse"
version = release = lightning_sparse.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_title = "lightning_sparse"
html_copy_source = False
html_show_copyright = False

myst_heading_anchors = 3  # levels of headings that can be linked to

autodoc_member_order = "bysource"
napoleon_use_rtype = False

# Names of other projects, whose inventories a build without a network cannot read.
nitpick_ignore_regex = [
    (r"py:.*", r"(torch|lightning|torchmetrics|pytorch_lightning|numpy|matplotlib)(\..*)?"),
    (r"py:.*", r"(collections|pathlib|typing|datetime)\..*"),
    (r"py:class", r"tuple\[.*"),
    (r"py:class", r"(Tensor|Module|Trainer|LightningModule|Figure|optional)"),
]


def setup(app: Any) -> None:
    """Sphinx calls this."""
    app.connect("autodoc-process-docstring", escape, priority=400)  # before napoleon
    app.connect("missing-reference", link_to_public_name)


def escape(app: Any, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Docstrings write |x| and [*s] and mean it."""
    for i, line in enumerate(lines):
        parts = re.split(r"(``.*?``)", line)
        parts[::2] = [re.sub(r"\||\*(?=\w+\])", r"\\\g<0>", part) for part in parts[::2]]
        lines[i] = "".join(parts)


def link_to_public_name(app: Any, env: Any, node: Any, text: Any) -> Any:
    """Names in docstrings and signatures are those of their modules; link to where the page has them.

    One that has no place of its own but is the package's stays text; any other is Sphinx's to warn of.
    """
    target = node.get("reftarget", "")
    name = target.rpartition(".")[2]
    if node.get("refdomain") != "py" or (name != target and not target.startswith("lightning_sparse")):
        return None
    python = env.get_domain("py")
    known = [full for full in python.objects if full == name or full.endswith(f".{name}")]
    public = [full for full in known if full == f"lightning_sparse.{name}"] or (known if len(known) == 1 else [])
    if public:
        return python.resolve_xref(env, node["refdoc"], app.builder, "obj", public[0], node, text)
    return text if known or is_of_the_package(target, name) else None


def is_of_the_package(target: str, name: str) -> bool:
    """Whether ``target`` is a module of this package, or anything in it is called ``name``."""
    modules = {key: module for key, module in sys.modules.items() if key.partition(".")[0] == "lightning_sparse"}
    things = [thing for module in modules.values() for thing in [module, *vars(module).values()]]
    return target in modules or any(hasattr(thing, name) for thing in things if isinstance(thing, type | type(re)))
