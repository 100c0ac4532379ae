"""Streams, verdicts, incidents, policy, decisions and promotion: pure, without input or output.

| word | what it is | where |
| --- | --- | --- |
| stream | the points that one sender sends of a series, one after the other | `point_streams` |
| row | the newest value of a stream, in arrays; most streams have one | `columns.stream_rows` |
| series | a metric, a slice and a kernel pair: all of its streams | `series` |
| slot | what a series has counted since it was settled | `columns.series_slots` |
| pane | what a series has counted in a part of a window | `series` |
| cell | a clause, a slice and a kernel pair: what gets a verdict | `cells` |
| columns | many of any of these, a field of all in one array | |
"""
