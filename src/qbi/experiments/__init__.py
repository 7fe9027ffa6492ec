"""Measurements of many settings: the paper's evaluation, attacks against defences, the calibration of detectors."""
