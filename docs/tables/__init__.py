"""Tables and single numbers of the documents, each made from a file in `docs/data` that a command wrote."""

from collections.abc import Callable

from tables.detection import answers, crafted_found, detectors, held_out, in_sample
from tables.flower import example, flower
from tables.matrix import aggp_imagenet, compared, epsilons, worst, worst_cases
from tables.paper import beyond, federation, reproduction, saturation, trap_imagenet
from tables.private import best_case, candidates, cost, equal_bits, learned, noise_cost, price, rates, read_72, steps
from tables.speed import aggp_step, aggp_steps, audits, bench, large_audits, pairs_time

TABLES: dict[str, Callable[[], str]] = {
    "price": price,
    "rates": rates,
    "equal-bits": equal_bits,
    "best-case": best_case,
    "learned": learned,
    "candidates": candidates,
    "private-h200": lambda: steps("private-h200"),
    "private-cpu": lambda: steps("private-cpu"),
    "flower": flower,
    "example": example,
    "bench-cpu": lambda: bench("bench-cpu"),
    "bench-h200": lambda: bench("bench-h200"),
    "audits": audits,
    "large-audits": large_audits,
    "reproduction": reproduction,
    "federation": federation,
    "beyond-imagenet": lambda: beyond("imagenet"),
    "beyond-cifar": lambda: beyond("cifar10"),
    "beyond-imdb": lambda: beyond("imdb"),
    "compare": lambda: compared("compare"),
    "rounds": lambda: compared("rounds"),
    "wide": lambda: compared("wide"),
    "dp-sgd": lambda: compared("dp-sgd"),
    "worst-cases": worst_cases,
    "aggp-imagenet": aggp_imagenet,
    "answers": answers,
    "detectors": detectors,
    "saturation": saturation,
    "epsilons": epsilons,
}

VALUES: dict[str, Callable[[], str]] = {
    "trap-imagenet": trap_imagenet,
    "read-72": read_72,
    "noise-cost": noise_cost,
    "cost-paper-cnn": lambda: cost("paper-cnn"),
    "cost-flower-example": lambda: cost("flower-example"),
    "cost-quickstart": lambda: cost("quickstart"),
    "cost-two-layer": lambda: cost("two-layer"),
    "aggp-step-cpu": lambda: aggp_step("bench-cpu"),
    "aggp-steps-gpu": aggp_steps,
    "pairs-cpu": lambda: pairs_time("bench-cpu"),
    "pairs-gpu": lambda: pairs_time("bench-h200"),
    "held-out": held_out,
    "in-sample": in_sample,
    "crafted-found": crafted_found,
    "aggp-imprint": lambda: worst("aggp", "imprint", 64),
    "aggp-mirrored": lambda: worst("aggp", "mirrored", 20),
}
