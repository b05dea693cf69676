"""No secret in what we write down: names and shapes of secrets, and their removal from text.

Credentials come through the ordinary chain of the libraries and are never arguments or fields of ours; this is the
net below that, for log lines of children, for command lines, and for job environments.
"""

import os
import re

NAMES = re.compile(
    r"(TOKEN|SECRET|PASSW(OR)?D|API_?KEY|PRIVATE_?KEY|ACCESS_?KEY|CREDENTIAL|AUTH_STRING|SIGNATURE)",
    re.IGNORECASE,
)
HARMLESS = re.compile(r"(TOKENIZER|TOKENS|_FILE$|_PATH$|GOOGLE_APPLICATION_CREDENTIALS)", re.IGNORECASE)
SHAPES = re.compile(
    r"(ya29\.[\w.-]{10,}|AIza[\w-]{30,}|gh[pousr]_\w{20,}|hf_\w{20,}|pnu_\w{20,}|AKIA[A-Z0-9]{12,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[^-]*(-----END [A-Z ]*PRIVATE KEY-----)?)"
)
USER_IN_URL = re.compile(r"(?<=://)[^\s/@]+@")
NAMED = re.compile(r"(?:^|[?&\s])-{0,2}([A-Za-z][\w.-]*)=[^&\s]")
MASK = "[removed]"


def looks_secret(name: str, value: str = "") -> bool:
    """Whether an environment variable seems to hold a secret, by its name or by the shape of its value."""
    named = bool(NAMES.search(name)) and not HARMLESS.search(name)
    return named or bool(SHAPES.search(value))


def why_secret(text: str) -> str:
    """Why a recipe may not hold `text`: '' for an ordinary one. The answer never repeats the secret."""
    if SHAPES.search(text):
        return "it has the shape of a credential"
    if USER_IN_URL.search(text):
        return "its URL holds a user name or password"
    named = [n for n in NAMED.findall(text) if looks_secret(n.replace("-", "_"))]
    return f"it sets {named[0]!r}" if named else ""


def secrets() -> list[str]:
    """Values of this process's environment that seem secret, longest first."""
    found = {v for k, v in os.environ.items() if len(v) >= 8 and looks_secret(k)}
    return sorted(found, key=len, reverse=True)


def redact(text: str) -> str:
    """`text` with the secrets of the environment, users in URLs and everything of a secret's shape replaced."""
    for value in secrets():
        text = text.replace(value, MASK)
    return USER_IN_URL.sub(f"{MASK}@", SHAPES.sub(MASK, text))
