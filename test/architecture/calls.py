"""The library never ends the process, prints, reads the environment or throws anything but a failed allocation."""
import re
import sys

from source import CPP, code_only, files, finish, read

FORBIDDEN = {
    r"\b(?:printf|fprintf|vprintf|vfprintf|puts|fputs|putchar|putc|fputc|perror|psignal)\s*\(": "prints",
    r"\bstd::(?:cout|cerr|clog|print|println)\b": "prints",
    r"#\s*include\s*<(?:iostream|print)>": "iostream has static initialisers",
    r"(?<![.\w>])(?:abort|exit|_exit|_Exit|quick_exit)\s*\(": "ends the process",
    r"\bstd::(?:abort|exit|_Exit|quick_exit|terminate)\b": "ends the process",
    r"\b(?:secure_)?getenv\s*\(": "options never come from the environment",
    r"\b(?:signal|sigaction)\s*\(": "installs a signal handler",
    r"#\s*include\s*<regex>": "std::regex recurses over its input",
    r"\bthrow\b(?!\s+std::bad_alloc|\s*;)": "only failed allocations throw",
    r"\b(?:strcpy|strcat|sprintf|vsprintf|gets|atoi|atol|atof|strtok|rand|srand)\s*\(": "unchecked, or with global state",
}


def main():
    problems = []
    rules = [(re.compile(pattern), why) for pattern, why in FORBIDDEN.items()]
    for path in files("src", "kernels", suffixes=CPP):
        for number, line in enumerate(code_only(read(path)).splitlines(), 1):
            problems += [f"{path}:{number}: {match.group().strip()}: {why}"
                         for rule, why in rules for match in [rule.search(line)] if match]
    return finish(problems)


sys.exit(main())
