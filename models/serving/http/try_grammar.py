"""A program of its own, which compiles the grammar that it reads from standard input: `Compilers.prove` starts and, if
need be, ends it. It imports nothing of jtile, so that it is there in a tenth of a second.

Its vocabulary is the bytes, since what takes for ever is to compile the lexer, of which no tokens are part.
"""

import resource
import sys

MEMORY = 1 << 30  # bytes: ordinary schemas take some megabytes, and one that takes for ever 50 more a second


def main(seconds: int) -> None:
    """Compiles; the system ends the process after so many seconds of work, if who started it has gone, or where it has
    no memory left."""
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    from llguidance import LLMatcher, LLTokenizer

    matcher = LLMatcher(LLTokenizer("byte"), sys.stdin.read(), log_level=0)
    if not matcher.is_error():  # what is wrong with it is said by who compiles it next
        matcher.compute_bitmask()


if __name__ == "__main__":
    main(int(sys.argv[1]))
