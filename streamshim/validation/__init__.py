"""Validating a kernel against its reference, without leaving the device: `streamshim.validate`.

Everything between the two calls and the counters is operations of the device, so a CUDA graph has the check in it and
goes on checking at every replay. `calls` is the wrapper, `settings` what it was given, `structure` finds the tensors in
what the two return, `compare` compares two of them, `stats` makes the counters and adds to them, `entries` has them for
each line and shape, `samples` keeps bad calls and `saved` writes them to a file. `compiled` is the operator that
torch.compile sees. `report` reads the counters, and `reading` is what it says.
"""
