"""Measurements behind tables of the documents: each writes docs/data/NAME.json, and `make docs` puts it into the pages.

python docs/measure.py best-case --data cifar-10-python.tar.gz
python docs/measure.py learned --data cifar10
python docs/measure.py detection --data cifar-10-python.tar.gz
python docs/measure.py calibration --data cifar-10-python.tar.gz
python docs/measure.py longer --data cifar-10-python.tar.gz
python docs/measure.py audit
python docs/measure.py federations --data cifar-10-python.tar.gz
python docs/measure.py filters --data cifar-10-python.tar.gz
python docs/measure.py saturation --data imagenet
python docs/measure.py training --data cifar10
python docs/measure.py zoo

What `qbi bench`, `compare` and `reproduce` write is kept beside them as it is, values rounded.
"""

import argparse
from pathlib import Path

from measured.detectors import calibration, detection, longer
from measured.reading import best_case, learned, pictures, saturation
from measured.running import audit_times, audits, federations, training, zoo
from measured.stock import filters

from qbi.files import to_json, write_atomically

HERE = Path(__file__).parent / "data"
TRAINING = Path(__file__).parent.parent / "src/qbi/lab/reproduce/published/training_full.json"


def main() -> None:
    """Measure one thing and write it down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = {
        "best-case": best_case,
        "pictures": pictures,
        "learned": learned,
        "detection": detection,
        "calibration": calibration,
        "longer": longer,
        "audit": audits,
        "audit-times": audit_times,
        "federations": federations,
        "filters": filters,
        "training": training,
        "saturation": saturation,
        "zoo": zoo,
    }
    parser.add_argument("what", choices=known)
    parser.add_argument("--data", default="photos")
    chosen = parser.parse_args()
    out = TRAINING if chosen.what == "training" else HERE / f"{chosen.what}.json"
    write_atomically(out, to_json(known[chosen.what](chosen.data)))


if __name__ == "__main__":
    main()
