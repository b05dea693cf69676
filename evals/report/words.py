"""Figures as words: one rule for digits, signs and intervals in page, Markdown and terminal."""

from typing import Any


def number(x: Any, digits: int = 4) -> str:
    """A figure in fixed digits, or in scientific form where those would hide it."""
    if x is None:
        return ""
    if x == 0:
        return "0"
    return f"{x:.{digits}f}" if abs(x) >= 10.0 ** (1 - digits) else f"{x:.1e}"


def signed(x: float) -> str:
    """A difference with its sign."""
    return "0" if x == 0 else f"{x:+.4f}" if abs(x) >= 1e-3 else f"{x:+.1e}"


def interval(c: dict[str, Any]) -> str:
    """`[low, high]` of a comparison."""
    return f"[{signed(c['low'])}, {signed(c['high'])}]"
