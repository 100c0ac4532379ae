import numpy as np

from kc_otel.record.measure.blocks import Block
from kc_otel.record.measure.sampled import TOKEN
from kc_otel.record.telemetry.reduce import _row_stats


def test_rows_are_reduced_for_every_quantity_of_a_token():
    """A quantity that is added to TOKEN and forgotten in the reduction fails here by its name."""
    train = np.array([-0.5, -2.0, -1.0, -0.1, -3.0])
    block = Block(np.arange(2), np.array([0, 3]), np.array([3, 2]), train, np.array([-1.0, -1.5, -1.0, -0.3, -0.2]))
    stats = _row_stats(block.log_w, np.expm1(block.log_w), block)
    for column, (key, quantity) in enumerate(TOKEN.items()):
        values = quantity(block.log_w)
        rows = [(row.sum(), row.min(), row.max()) for row in (values[:3], values[3:])]
        np.testing.assert_allclose(stats[:, :, column].T, rows, rtol=1e-12, err_msg=key)
