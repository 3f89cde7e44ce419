"""Validating a kernel against its reference, without leaving the device: `streamshim.validate`.

Everything between the two calls and the counters is operations of the device, so a CUDA graph has the check in it and
goes on checking at every replay. `calls` is the wrapper, `structure` finds the tensors in what the two return,
`compare` compares two of them, `stats` keeps the counters, `samples` the inputs of bad calls, `compiled` is the
operator that torch.compile sees, `report` reads the counters, `reading` turns them into text and JSON.
"""
