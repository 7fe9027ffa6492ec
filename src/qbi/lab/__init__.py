"""The laboratory: measurements of many settings. The paper's evaluation, attacks against defences, detectors, prices, times.

The product never imports it. What it needs beyond the product is the extra `lab`.
"""
