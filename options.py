"""Command lines from dataclasses: a field is an option, its comment is the option's help.

    @dataclass(frozen=True)
    class Options:
        steps: int = 400  # optimizer steps
        betas: tuple[float, float] = (0.9, 0.95)  # AdamW's
        compile: bool = False  # compile the blocks

    parse(Options, ["--steps", "3", "--betas", "0.9", "0.99", "--compile"])

`field(default=..., metadata={"alias": "name"})` gives an option a second name. A comment may go on in lines of its own
under the field. Tuples take as many values as they have types, or any number
where they are tuple[T, ...]. An unknown option is an error that names the nearest; so is one given twice.
"""

import argparse
import dataclasses
import difflib
import inspect
import re
import sys
import time
import types
import typing


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise ValueError(message)


def parse(cls, argv: list[str], description: str = ""):
    """An instance of the dataclass `cls` from command-line words. ValueError, in one line, for what does not fit."""
    parser = Parser(description=description, allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    helps, hints = comments(cls), typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        kind, many = value_type(hints[field.name])
        flags = ["--" + name.replace("_", "-") for name in (field.name, field.metadata.get("alias")) if name]
        required = field.default is dataclasses.MISSING
        keywords = {"help": helps[field.name] or " ", "default": None if required else field.default}
        if kind is bool:
            parser.add_argument(*flags, action=argparse.BooleanOptionalAction, **keywords)
        elif typing.get_origin(kind) is typing.Literal:
            parser.add_argument(*flags, choices=typing.get_args(kind), required=required, **keywords)
        else:
            parser.add_argument(*flags, type=kind, nargs=many, required=required, **keywords)
    refuse_strangers(parser, argv)
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in vars(parser.parse_args(argv)).items()}
    return cls(**values)


def refuse_strangers(parser: Parser, argv: list[str]):
    known = [flag for action in parser._actions for flag in action.option_strings]
    given = [word.split("=")[0] for word in argv if word.startswith("--")]
    for flag in given:
        if flag not in known:
            near = difflib.get_close_matches(flag, known, 1, 0.3)
            raise ValueError(f"unknown option {flag}" + (f"; did you mean {near[0]}?" if near else ""))
        if given.count(flag) > 1:
            raise ValueError(f"{flag} is given {given.count(flag)} times")


def value_type(hint):
    """(type of one value, argparse's nargs) of an annotation: T, T | None, tuple[T, T] or tuple[T, ...]."""
    if isinstance(hint, types.UnionType):
        hint = next(arg for arg in typing.get_args(hint) if arg is not type(None))
    if typing.get_origin(hint) is tuple:
        args = typing.get_args(hint)
        return args[0], "*" if args[1:] == (...,) else len(args)
    return hint, None


def comments(cls) -> dict[str, str]:
    """Each field's comment, with its continuation lines, read from the source of the class and its bases."""
    found, field = {f.name: "" for f in dataclasses.fields(cls)}, None
    sources = [inspect.getsource(base) for base in reversed(cls.__mro__) if dataclasses.is_dataclass(base)]
    for line in "\n".join(sources).splitlines():
        code, _, comment = line.partition("  # ")
        if match := re.match(r"    (\w+): ", code):
            field = match[1] if match[1] in found else None
            if field:
                found[field] = comment.strip()
        elif field and line.strip().startswith("# "):
            found[field] += " " + line.strip()[2:]
        else:
            field = None
    return {name: text.replace("%", "%%") for name, text in found.items()}


def exit_with(program: str, error: Exception, first: bool = True):
    """End this process with one line on standard error and status 2. What every rank found wrong (ValueError, or a
    loss that is no number), the `first` of each machine says, for a machine may have found it alone (its files); an
    error of one rank's own (RuntimeError, OSError) that rank says."""
    if first or not isinstance(error, (ValueError, FloatingPointError)):
        print(f"{program}: {' '.join(str(error).split(chr(10)))}", file=sys.stderr, flush=True)
    else:
        time.sleep(3)  # torchrun ends all as soon as one has ended, and rank 0 may yet have to say its line
    sys.exit(2)
