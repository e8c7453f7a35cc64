"""The package's shape: imports go downward, the core needs three packages, nothing unpickles,
public names are documented."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import advbayes

ROOT = Path(advbayes.__file__).parent
LAYOUT = """
seeds checks progress types distributed likelihoods model posteriors attacks channels objectives
accelerated metrics predictive purification adapters training store evaluation auditing
datasets networks runs report experiments estimators testing cli
"""
ORDER = LAYOUT.split()
CORE_PACKAGES = {"advbayes", "torch", "numpy", "safetensors", "filelock"} | set(
    sys.stdlib_module_names
)
CORE = ORDER[: ORDER.index("auditing") + 1]
FILES = sorted(ROOT.rglob("*.py"))


def module_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def top_imports(tree: ast.Module) -> list[tuple[str, int]]:
    """Modules imported when the file is imported (those inside functions are optional parts, asked
    for when used)."""
    found: list[tuple[str, int]] = []

    def visit(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                continue
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.Import):
                found.extend((alias.name, child.lineno) for alias in child.names)
            elif isinstance(child, ast.ImportFrom) and child.module and not child.level:
                if child.module == "advbayes":
                    names = [alias.name for alias in child.names if alias.name != "__version__"]
                    found.extend((f"advbayes.{name}", child.lineno) for name in names)
                else:
                    found.append((child.module, child.lineno))
            visit(child)

    visit(tree)
    return found


def test_the_top_level_names_fit_on_one_screen() -> None:
    assert len(ORDER) <= 28


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_strictly_downward(path: Path) -> None:
    own = module_of(path)
    if own in ("__init__", "__main__"):
        return
    assert own in ORDER, f"{own} has no place in the layout"
    for name, line in top_imports(ast.parse(path.read_text())):
        parts = name.split(".")
        if parts[0] == "advbayes" and len(parts) > 1:
            assert parts[1] in ORDER, f"{path.name}:{line} imports {name}"
            below = parts[1] == own or ORDER.index(parts[1]) < ORDER.index(own)
            assert below, (
                f"{path.name}:{line}: {own} imports {parts[1]}, which stands below it in the layout"
            )
        elif own in CORE:
            assert parts[0] in CORE_PACKAGES, (
                f"{path.name}:{line} imports {name}: the core needs torch, numpy, safetensors, "
                f"filelock alone"
            )


FORBIDDEN_MODULES = {
    "pickle",
    "cPickle",
    "dill",
    "cloudpickle",
    "joblib",
    "marshal",
    "shelve",
    "yaml",
}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_ATTRIBUTES = {
    ("torch", "load"),
    ("torch", "save"),
    ("np", "load"),
    ("numpy", "load"),
    ("yaml", "load"),
}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_unpickles_or_evaluates(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert not {alias.name.split(".")[0] for alias in node.names} & FORBIDDEN_MODULES
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] not in FORBIDDEN_MODULES
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name):
                assert node.func.id not in FORBIDDEN_CALLS, f"{path.name}:{node.lineno}"
            elif isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
                call = (node.func.value.id, node.func.attr)
                if call == ("np", "load"):
                    given = {k.arg: ast.unparse(k.value) for k in node.keywords}
                    assert given.get("allow_pickle") == "False", f"{path.name}:{node.lineno}"
                else:
                    assert call not in FORBIDDEN_ATTRIBUTES, f"{path.name}:{node.lineno}"
            for keyword in node.keywords:
                if keyword.arg == "allow_pickle":
                    assert ast.unparse(keyword.value) == "False", f"{path.name}:{node.lineno}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_what_is_refused_on_purpose_says_so_by_its_type(path: Path) -> None:
    """The command line tells a mistake of the user from a bug by `AdvBayesError` alone."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            name = ast.unparse(node.exc.func)
            assert name not in ("ValueError", "TypeError", "FloatingPointError"), (
                f"{path.name}:{node.lineno}: raise checks.InputError or checks.InputTypeError"
            )


def test_public_names_exist_and_are_documented() -> None:
    assert len(advbayes.__all__) == len(set(advbayes.__all__))
    for name in advbayes.__all__:
        public = getattr(advbayes, name)
        assert (public.__doc__ or "").strip(), f"{name} has no docstring"


@pytest.mark.parametrize("old", sorted(advbayes._MOVED))
def test_modules_that_moved_are_found_by_their_old_names(old: str) -> None:
    home = importlib.import_module(advbayes._MOVED[old])
    sys.modules.pop(old, None)
    assert importlib.import_module(old) is home
    assert home.__spec__ is not None
    assert home.__spec__.name == home.__name__


def test_type_checkers_see_the_names_that_run_time_has() -> None:
    """The lazy table and the imports for type checkers are one list."""
    tree = ast.parse((ROOT / "__init__.py").read_text())
    block = next(
        node
        for node in tree.body
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    )
    seen = {
        (alias.name, node.module)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == {(name, f"advbayes.{home}") for name, home in advbayes._HOME_OF.items()}


def test_the_core_imports_without_the_extras() -> None:
    """A fresh interpreter in which every optional package is missing still imports and predicts."""
    script = (
        "import sys\n"
        "for name in ('sklearn', 'pooch', 'typer', 'rich', 'pydantic', 'matplotlib', 'jinja2', "
        "'scipy', 'pandas'):\n"
        "    sys.modules[name] = None\n"
        "import torch, advbayes\n"
        "m = advbayes.BayesianModel(torch.nn.Linear(2, 2), advbayes.Categorical())\n"
        "advbayes.PosteriorPredictive(m, advbayes.MeanField(m).sample(2))(torch.zeros(1, 2))\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
