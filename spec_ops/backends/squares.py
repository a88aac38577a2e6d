"""How an RMS norm that is divided between two products hands over the squares of a row, as sums of a few columns each: what the
kernels, their ops and the reference agree on."""

SUM_COLUMNS = 16  # whose squares are one sum


def sums_of(columns: int) -> int:
    """How many sums of squares a row of so many columns has."""
    return -(-columns // SUM_COLUMNS)
