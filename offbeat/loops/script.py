"""An optimizer's class that a script defines itself, for servers, which must not run the script.

Out of the script's text comes a module that has the class and what it refers to: imports,
functions, classes and values at the top level, and what these refer to in turn. Nothing else is
executed. Used by description.py.
"""

import ast
import functools
import symtable
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import CodeType

import torch

from offbeat.errors import ModelError, in_a_line

_LOOPS = (ast.For, ast.While, ast.With)


class _Part(SourceFileLoader):
    """A loader of that part of a file which has the class `wanted`; nothing of it is cached."""

    def __init__(self, fullname: str, path: str, wanted: str) -> None:
        super().__init__(fullname, path)
        self._wanted = wanted

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        tree = ast.parse(self.get_data(path), path)
        tree.body = _needed(tree.body, self._wanted)
        return compile(tree, path, "exec")


@functools.cache
def class_in_script(file: str, name: str) -> type[torch.optim.Optimizer]:
    """The same one each time that it is asked for; a ModelError where it cannot be had."""
    loader = _Part(f"offbeat_script_{Path(file).stem}", file, name)
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None, "a file that is run is there"
    module = module_from_spec(spec)
    sys.modules[loader.name] = module
    try:
        loader.exec_module(module)
        found: type[torch.optim.Optimizer] = getattr(module, name)
    except Exception as error:
        raise ModelError(
            f"the servers cannot have the optimizer's class {name} out of {Path(file).name} "
            f"({in_a_line(error)}): define it at the top level of a file of its own, and import it"
        ) from error
    return found


def _needed(statements: list[ast.stmt], name: str) -> list[ast.stmt]:
    """Those that bind the name, or what they refer to, in the script's order. A loop is none."""
    found = {i: _names(s) for i, s in enumerate(statements) if not isinstance(s, _LOOPS)}
    wanted, chosen = {name}, set[int]()
    while more := {i for i, (bound, _) in found.items() if bound & {*wanted, "*"}} - chosen:
        chosen |= more
        wanted |= set().union(*(found[index][1] for index in more))
    return [statements[index] for index in sorted(chosen)]


def _names(statement: ast.stmt) -> tuple[set[str], set[str]]:
    """What a statement at the top level gives a value to, and what it needs one of; * is anything,
    as `from m import *` has it."""
    table = symtable.symtable(ast.unparse(statement), "", "exec")
    bound = {s.get_name() for s in table.get_symbols() if s.is_assigned() or s.is_imported()}
    if isinstance(statement, ast.ImportFrom) and statement.module == "__future__":
        bound.add("*")
    if any(isinstance(node, ast.alias) and node.name == "*" for node in ast.walk(statement)):
        bound.add("*")
    used = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_referenced()}
    return bound, used.union(*(_global_names(inside) for inside in table.get_children()))


def _global_names(table: symtable.SymbolTable) -> set[str]:
    """Those that a function or class, or what is inside, looks for at the top level."""
    own = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_global()}
    return own.union(*(_global_names(inside) for inside in table.get_children()))
