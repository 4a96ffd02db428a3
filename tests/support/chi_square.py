"""Whether counts are as a distribution says."""

from collections import Counter


def is_far_off(exact: dict, counts: Counter) -> bool:
    """Whether chi-square is above what it stays below in 999 of 1000 cases.

    Texts that are expected fewer than five times are one class.
    """
    num_runs = counts.total()
    often = [text for text, p in exact.items() if num_runs * p >= 5]
    classes = [(counts[text], num_runs * exact[text]) for text in often]
    classes.append((num_runs - sum(c for c, _ in classes), num_runs - sum(e for _, e in classes)))
    statistic = sum((count - expected) ** 2 / expected for count, expected in classes)
    df = len(classes) - 1
    # Wilson and Hilferty's approximation of the 0.999 quantile.
    return statistic > df * (1 - 2 / (9 * df) + 3.09 * (2 / (9 * df)) ** 0.5) ** 3
