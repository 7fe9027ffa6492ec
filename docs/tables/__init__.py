"""Tables and single numbers of the documents, each made from a file in `docs/data` that a command wrote."""

from collections.abc import Callable

from tables import claims, site
from tables.averaging import fedavg
from tables.detection import answers, by_attack, calibration_data, crafted_found, detectors, held_out, in_sample, longer
from tables.first_steps import first_steps
from tables.flower import example, flower
from tables.front_page import findings, needs
from tables.matching import matching, matching_provenance, patches, patches_provenance
from tables.matrix import aggp_imagenet, compared, epsilons, worst, worst_cases
from tables.paper import beyond, federation, reproduction, saturation, trap_imagenet
from tables.pictures import pictures, seen_at_16
from tables.private import (
    best_case,
    candidates,
    equal_bits,
    learned,
    noise_cost,
    presets,
    price,
    rates,
    read_72,
    slowest,
    steps,
)
from tables.sentences import sentences, sentences_aims, sentences_provenance
from tables.speed import aggp_step, aggp_steps, audit_times, audits, bench, large_audits, pairs_time
from tables.stock import filters
from tables.words import glossary

TABLES: dict[str, Callable[[], str]] = {
    "price": price,
    "rates": rates,
    "equal-bits": equal_bits,
    "best-case": best_case,
    "learned": learned,
    "candidates": candidates,
    "presets": presets,
    "private-h200": lambda: steps("private-h200"),
    "private-cpu": lambda: steps("private-cpu"),
    "first-steps": first_steps,
    "flower": flower,
    "filters": filters,
    "example": example,
    "bench-cpu": lambda: bench("bench-cpu"),
    "bench-h200": lambda: bench("bench-h200"),
    "audits": audits,
    "large-audits": large_audits,
    "pictures": pictures,
    "fedavg": fedavg,
    "sentences": sentences,
    "matching": matching,
    "patches": patches,
    "audit-times": audit_times,
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
    "crafted": by_attack,
    "saturation": saturation,
    "epsilons": epsilons,
    "glossary": glossary,
    "findings": findings,
    "needs": needs,
    "expected": site.expected,
    "levels": site.levels,
}

VALUES: dict[str, Callable[[], str]] = {
    "sentences-aims": sentences_aims,
    "sentences-provenance": sentences_provenance,
    "matching-provenance": matching_provenance,
    "patches-provenance": patches_provenance,
    "trap-imagenet": trap_imagenet,
    "seen-fedavg": lambda: seen_at_16("FedAvg's CNN", trained=False),
    "seen-fedavg-trained": lambda: seen_at_16("FedAvg's CNN", trained=True),
    "seen-quickstart": lambda: seen_at_16("quickstart", trained=False),
    "seen-quickstart-trained": lambda: seen_at_16("quickstart", trained=True),
    "read-72": read_72,
    "noise-cost": noise_cost,
    "largest-cost": claims.largest_cost,
    "cost-on-all-images": claims.cost_on_all_images,
    "whole-batches": claims.whole_batches,
    "honest-batches": claims.honest_batches,
    "full-rank": claims.at_full_rank,
    "agreement-images": lambda: claims.agreement("imagenet-recall", "cifar10-recall", "normalisation"),
    "agreement-text": lambda: claims.agreement("imdb-recall"),
    "too-often": claims.fires_too_often,
    "layer-norm": claims.layer_norm_similarity,
    "aggp-accuracy": claims.aggp_accuracy,
    "aggp-rows": claims.aggp_rows,
    "guess": claims.guess_recognised,
    "learned-data": claims.learned_data,
    "candidates": claims.candidates,
    "default-reading": claims.default_reading,
    "slowest": lambda: slowest("private-h200"),
    "aggp-step-cpu": lambda: aggp_step("bench-cpu"),
    "aggp-steps-gpu": aggp_steps,
    "pairs-cpu": lambda: pairs_time("bench-cpu"),
    "pairs-gpu": lambda: pairs_time("bench-h200"),
    "held-out": held_out,
    "in-sample": in_sample,
    "longer": longer,
    "crafted-found": crafted_found,
    "calibration-data": calibration_data,
    "aggp-imprint": lambda: worst("aggp", "imprint", 64),
    "aggp-mirrored": lambda: worst("aggp", "mirrored", 20),
    "levels-data": site.levels_data,
    "levels-guess": site.levels_guess,
    "quickstart-seen": site.quickstart_seen,
    "epsilon-8": site.epsilon_8,
    "near-epsilon-8": site.near_epsilon_8,
    "epsilon-of-72": site.epsilon_of_72,
    "alone": lambda: site.in_federation("FedSGD: one gradient"),
    "sum-of-ten": lambda: site.in_federation("secure sum of 10 clients"),
    "sybils": lambda: site.in_federation("secure sum of 10, of whom 9 are sybils"),
    "secagg-sybils": lambda: site.through_filter("SecAgg+", "5 clients, of whom 4 are sybils", "cascade"),
    "accuracy-plain": lambda: site.accuracy_with("none"),
    "accuracy-opacus": lambda: site.accuracy_with("Opacus", "noise 1, clip 1"),
}
