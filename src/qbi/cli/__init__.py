"""The command line: one thin module per command."""

import errno
import os
import sys
import traceback

from qbi.errors import QbiError, printable

INTERRUPTED = 130
FAULT = 70
"""Exit code of a fault in the program itself, as in sysexits.h."""

KEPT = "what was finished is kept, and the same command goes on from there"
NOTHING_KEPT = "nothing was written, and what earlier runs wrote is untouched"


def main() -> None:
    """Run `qbi`; what the user can mend becomes one sentence and exit code 2."""
    # Threads that spin while they wait take the processor from those they wait for, many times over on a busy machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from qbi.cli.app import app

    try:
        app(prog_name="qbi")  # by the name that completion is installed for, also under `python -m qbi`
    except QbiError as problem:
        sys.stderr.write(f"qbi: {printable(str(problem))}\n")
        raise SystemExit(2) from None
    except SystemExit as ended:
        if ended.code == INTERRUPTED:
            sys.stderr.write(f"qbi: stopped; {KEPT if sys.argv[1:2] == ['reproduce'] else NOTHING_KEPT}.\n")
        if isinstance(ended.__context__, BrokenPipeError):
            sys.stderr.write("qbi: standard output was closed before all of it was written; read it to its end.\n")
            raise SystemExit(2) from None
        raise
    except OSError as problem:
        # Python's own exit code for these is 1, which a pipeline reads as a leak.
        sys.stderr.write(f"qbi: {printable(_explained(problem))}\n")
        raise SystemExit(2) from None
    except Exception:
        # A pipeline reads 1 as "a leak was found" and 2 as "bad input": a fault of ours is neither.
        traceback.print_exc()
        sys.stderr.write(
            "qbi: this is a fault of qbi's own, not of your input; please report it with the lines above.\n"
        )
        raise SystemExit(FAULT) from None


def _explained(problem: OSError) -> str:
    said = problem.strerror or str(problem) or type(problem).__name__
    if problem.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        return f"{said} while writing; free some space, and the same command goes on."
    place = " and ".join(str(name) for name in (problem.filename, problem.filename2) if name is not None)
    remedy = "check that it is there and that nothing else uses it, and run the command again"
    return f"{place or 'the system'}: {said}; {remedy}."
