"""Every mutant of the sources, by the operators of cosmic-ray, and a reproducible sample of them."""

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .code import Code
from .settings import Settings

OPERATORS = (
    # Each operator of cosmic-ray that turns a tensor program into another one that runs. The remaining replacements
    # (`+` by `<<`, `<` by `is`, …) fail at once on floats and would fill the sample with easy kills.
    *(f"core/ReplaceBinaryOperator_{pair}" for pair in ("Add_Sub", "Sub_Add", "Mul_Div", "Mul_Add", "Div_Mul")),
    *(f"core/ReplaceBinaryOperator_{pair}" for pair in ("FloorDiv_Mul", "Mod_FloorDiv", "Pow_Mul", "BitXor_BitOr")),
    *(f"core/ReplaceBinaryOperator_{pair}" for pair in ("BitOr_BitAnd", "BitAnd_BitOr")),
    *(f"core/ReplaceBinaryOperator_{pair}" for pair in ("LShift_RShift", "RShift_LShift")),
    *(f"core/ReplaceComparisonOperator_{pair}" for pair in ("Eq_NotEq", "NotEq_Eq", "Lt_LtE", "Lt_GtE", "LtE_Lt")),
    *(f"core/ReplaceComparisonOperator_{pair}" for pair in ("LtE_Gt", "Gt_GtE", "Gt_LtE", "GtE_Gt", "GtE_Lt")),
    *(f"core/ReplaceComparisonOperator_{pair}" for pair in ("Is_IsNot", "IsNot_Is")),
    *(f"core/ReplaceUnaryOperator_{pair}" for pair in ("USub_UAdd", "Delete_Not", "Delete_Invert")),
    "core/AddNot",
    "core/ExceptionReplacer",
    "core/NumberReplacer",
    "core/RemoveDecorator",
    "core/ReplaceAndWithOr",
    "core/ReplaceBreakWithContinue",
    "core/ReplaceContinueWithBreak",
    "core/ReplaceFalseWithTrue",
    "core/ReplaceOrWithAnd",
    "core/ReplaceTrueWithFalse",
    "core/ZeroIterationForLoop",
)


@dataclass(frozen=True)
class Mutant:
    """One change to one line. Its name depends on the line's text, not on its number."""

    file: str
    function: str
    line: str  # the text of the line, without indentation
    operator: str
    nth: int  # among the mutants of the same file, function, line and operator
    number: int  # of the line, at present
    column: int
    occurrence: int  # which of the operator's places in the file: what cosmic-ray asks for

    @property
    def key(self) -> tuple[str, str, str, str, int]:
        return self.file, self.function, self.line, self.operator, self.nth

    @property
    def name(self) -> str:
        return name_of(self.key)

    def package(self, sources: tuple[str, ...]) -> str:
        """The folder below the first source that holds the file, for the table."""
        parts = Path(self.file).parts
        depth = next((len(Path(s).parts) for s in sources if Path(s).parts == parts[: len(Path(s).parts)]), 1)
        return parts[depth] if len(parts) > depth + 1 else "/".join(parts[max(depth - 1, 0) : depth])


def name_of(key: tuple[str, str, str, str, int]) -> str:
    return hashlib.sha1("\0".join(map(str, key)).encode()).hexdigest()[:12]


def mutants_of(file: str, text: str) -> Iterator[Mutant]:
    """Every mutant of a file, in order of the operators and of the places."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator

    code = Code(text)
    nodes = list(ast_nodes(get_ast(text)))
    seen: Counter[tuple[str, str, str]] = Counter()
    for name in OPERATORS:
        operator = get_operator(name)()
        places = [place for node in nodes for place, _ in operator.mutation_positions(node)]
        for occurrence, (number, column) in enumerate(places):
            if code.is_worthless((number, column)):
                continue
            group = code.scope_at(number), code.lines[number - 1].strip(), name
            yield Mutant(file, *group, nth=seen[group], number=number, column=column, occurrence=occurrence)
            seen[group] += 1


def all_mutants(settings: Settings) -> list[Mutant]:
    return [m for file in settings.files() for m in mutants_of(file, (settings.root / file).read_text())]


def sample(mutants: list[Mutant], size: int, seed: int) -> list[Mutant]:
    """A sample of places in the source, with one mutant of each, by the order of hashes.

    A larger sample contains a smaller one, and a change elsewhere in the source changes little of it: verdicts and
    comparisons between commits last.
    """

    def rank(mutant: Mutant, purpose: str) -> bytes:
        return hashlib.sha1(f"{purpose} {seed} {mutant.name}".encode()).digest()

    places: dict[tuple[str, int, int], Mutant] = {}
    for mutant in sorted(mutants, key=lambda m: rank(m, "mutant")):
        places.setdefault((mutant.file, mutant.number, mutant.column), mutant)
    return sorted(places.values(), key=lambda m: rank(m, "place"))[:size]


def mutated(text: str, mutant: Mutant) -> str:
    """The source with the mutant in it."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    changed = mutate_code(text, get_operator(mutant.operator)(), mutant.occurrence)
    if changed is None:
        raise ValueError(f"{mutant.operator} has no place {mutant.occurrence} in {mutant.file}: is it the same source?")
    return changed


def changed_line(before: str, after: str) -> tuple[str, str]:
    """The first line that differs, before and after."""
    pairs = zip(before.splitlines(), after.splitlines(), strict=False)
    return next(((b.strip(), a.strip()) for b, a in pairs if b != a), ("", ""))
