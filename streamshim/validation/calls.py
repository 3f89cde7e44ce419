"""`validate`: a kernel that is compared with its reference at each call, and at each replay of a graph it is in."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from .. import fork
from ..callsite import Site, user_site
from ..errors import HostSyncError, ValidationError
from . import settings as checks
from .compare import compare
from .entries import Entry, Output
from .environment import Run, asked_for
from .samples import Samples
from .settings import KERNEL, RAISE, RECORD, REFERENCE, WARN, Bound, Settings
from .stats import NOWHERE, Position, position, update
from .structure import Packed, described, pack, pairs, tensors, without_objects

#: For how many call sites and shapes one validated function counts; calls with others are counted together.
MAX_ENTRIES = 1000

Function = Callable[..., Any]
#: Positional and keyword arguments.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
#: Name, the kernel's tensor, the reference's.
_Pairs = list[tuple[str, torch.Tensor, torch.Tensor]]


class Validated:
    """A kernel and its reference, called like the kernel. Made by `validate`.

    Attributes:
        name: the name in reports; unique in the process.
        settings: what `validate` was given.
        run: what a call runs.
        entries: what was counted, by call site and shapes.
        skipped: how many eager calls were left out by ``sample``.
        samples: the first bad calls for each set of shapes and numbers.
        not_kept: why some were not kept although they were asked for.
    """

    def __init__(self, kernel: Function, reference: Function, settings: Settings, run: Run, fake: Function) -> None:
        self.kernel, self.reference, self.fake = kernel, reference, fake
        self.name, self.settings, self.run = settings.name, settings, run
        self.entries: dict[Any, Entry] = {}
        self.skipped = 0
        self.samples: dict[Any, Samples] = {}
        self.not_kept = ""
        self._numbers, self._skips = itertools.count(), itertools.count(1)
        self._lock = fork.Lock()

    def __repr__(self) -> str:
        return f"<streamshim.validate {self.name!r}, runs {self.run.value}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            from .compiled import call

            return call(self, args, kwargs)
        return self.call(args, kwargs)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site | None = None) -> Any:
        """The call, eager or captured; what torch.compile traces is in `compiled`.

        Args:
            args, kwargs: the arguments.
            site: the user's line; None if it is on the stack.
        """
        if self.run is not Run.BOTH:
            return (self.kernel if self.run is Run.KERNEL else self.reference)(*args, **kwargs)
        named = tensors((args, kwargs), "arguments")
        inputs = [tensor for _, tensor in named]
        where = _position(inputs)
        if not where.capture:
            if next(self._numbers) % self.settings.sample:
                self.skipped = next(self._skips)
                return (self.kernel if self.settings.use == KERNEL else self.reference)(*args, **kwargs)
            from .report import checkpoint

            checkpoint()
        own, copies = (args, kwargs), self._with_copies(args, kwargs)
        # What is kept of a bad call is what it was given, before either side has written to it.
        before = tensors(self._with_copies(args, kwargs), "") if self.settings.keep else []
        uses_kernel = self.settings.use == KERNEL
        for_kernel, for_reference = (own, copies) if uses_kernel else (copies, own)
        actual = self._one(KERNEL, for_kernel, uses_kernel)
        expected = self._one(REFERENCE, for_reference, not uses_kernel)
        outputs = pairs(actual, expected, "output", self.name)
        outputs += [(p.name, p.get(*for_kernel), p.get(*for_reference)) for p in self.settings.inplace]
        self._ensure_independent(outputs, inputs)
        with torch.no_grad():
            entry = self._entry(site or user_site(), own, outputs)
            bad, is_captured = self._count(entry, outputs)
            if self.settings.keep:
                any_bad = torch.stack([each for each in bad if each.device == bad[0].device]).amax()
                self._keep(any_bad, own, [tensor for _, tensor in before], outputs, is_captured)
        return actual if uses_kernel else expected

    def save_samples(self, path: str | Path) -> int:
        """Write the bad calls that were kept into a file for ``streamshim replay``. Waits for the device.

        Args:
            path: the file to write, with `torch.save`.

        Returns:
            How many there were.

        Raises:
            ValidationError: inside a capture, as `streamshim.validation_report`; if it was made without ``keep``.
        """
        if not self.settings.keep:
            raise ValidationError(f"{self.name}: nothing is kept; ask for it: streamshim.validate(..., keep=10)")
        from .report import ensure_outside_captures
        from .saved import save

        ensure_outside_captures("save_samples()")
        return save(self, path)

    def _with_copies(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """The same arguments, with copies of those that are written to."""
        positional, keywords = list(args), dict(kwargs)
        for place in self.settings.inplace:
            value = place.get(args, kwargs)
            if not isinstance(value, torch.Tensor):
                raise ValidationError(
                    f"{self.name}: inplace names {place.name!r}, which "
                    f"{f'was {described(value)} in' if place.is_in(args, kwargs) else 'was left out of'} this call; it "
                    "must be a tensor"
                )
            if place.position is not None and len(args) > place.position:
                positional[place.position] = value.detach().clone()
            elif place.keyword is not None:
                keywords[place.keyword] = value.detach().clone()
        return tuple(positional), keywords

    def _one(self, side: str, arguments: Arguments, is_used: bool) -> Any:
        """Call one side; without gradients, unless its result is what the caller gets."""
        args, kwargs = arguments
        function = self.kernel if side == KERNEL else self.reference
        # Views of one tensor share its version, so those of an argument that is written to say nothing.
        written = {place.get(args, kwargs).untyped_storage().data_ptr() for place in self.settings.inplace}
        watched = [
            (name, tensor, tensor._version)
            for name, tensor in tensors(args, "args") + tensors(kwargs, "kwargs")
            if not tensor.is_inference() and tensor.untyped_storage().data_ptr() not in written
        ]
        try:
            with torch.set_grad_enabled(is_used and torch.is_grad_enabled()):
                result = function(*args, **kwargs)
        except HostSyncError as error:
            operation = f"{error.report.operation}, in the {side} of the validated function {self.name!r}"
            raise HostSyncError(dataclasses.replace(error.report, operation=operation)) from error
        for name, tensor, version in watched:
            if tensor._version != version:
                raise ValidationError(
                    f"{self.name}: the {side} writes to {name}, which `inplace` does not name. The other side "
                    "would get, or has got, another input. Name it: streamshim.validate(..., inplace=(...))."
                )
        return result

    def _ensure_independent(self, outputs: _Pairs, inputs: list[torch.Tensor]) -> None:
        if not outputs:
            raise ValidationError(
                f"{self.name}: there is nothing to compare: the kernel returns no tensor, and `inplace` names none"
            )
        given = {tensor.data_ptr() for tensor in inputs}
        for name, actual, expected in outputs:
            if actual.numel() and actual.data_ptr() == expected.data_ptr() and actual.data_ptr() not in given:
                raise ValidationError(
                    f"{self.name}: the kernel and the reference return the same memory as {name}, so that would be "
                    "compared with itself. Let the reference allocate its own."
                )

    def _entry(self, site: Site, own: Arguments, outputs: _Pairs) -> Entry:
        """Where this call is counted."""
        given = tensors(own, "")
        shapes = tuple((t.shape, t.dtype, t.device) for _, t in given)
        results = tuple((name, t.shape, t.dtype, t.device) for name, t, _ in outputs)
        key: Any = (site, shapes, results)
        with self._lock:
            known = self.entries.get(key)
            if known is not None:
                return known
            is_full = len(self.entries) >= MAX_ENTRIES
            if is_full:
                # What is left of the shapes: which outputs there are, and of which types.
                key = tuple((name, t.dtype, t.device) for name, t, _ in outputs)
                known = self.entries.get(key)
                if known is not None:
                    return known
            self.settings.ensure_known(name for name, _, _ in outputs)
            made = [
                Output(
                    name, None if is_full else tuple(t.shape), t.dtype, t.device, self.settings.tolerance(name, t.dtype)
                )
                for name, t, _ in outputs
            ]
            words = "" if is_full else ", ".join(described(t) for _, t in given)
            self.entries[key] = entry = Entry(None if is_full else site, words, made)
        return entry

    def _count(self, entry: Entry, outputs: _Pairs) -> tuple[list[torch.Tensor], bool]:
        """Count this call; returns for each output whether it was wrong, on its device, and if the call is captured."""
        positions = [_position([actual]) for _, actual, _ in outputs]
        is_captured = any(where.capture for where in positions)
        with entry.lock:
            entry.captured += is_captured
            entry.calls += not is_captured
            bad = []
            for output, (_, actual, expected), where in zip(entry.outputs, outputs, positions, strict=True):
                sample = self.settings.sample if where.capture else 1
                bad.append(update(output.slot(where), compare(actual, expected, output.tolerance), sample))
        return bad, is_captured

    def _keep(
        self, bad: torch.Tensor, own: Arguments, before: list[torch.Tensor], outputs: _Pairs, is_captured: bool
    ) -> None:
        """Keep this call on the device, if it was wrong."""
        values = before + [tensor for _, actual, expected in outputs for tensor in (actual, expected)]
        if any(tensor.device != bad.device for tensor in values):
            self.not_kept = "there were tensors on more than one device"
            return
        packed = Packed()
        structure = without_objects(pack(own, packed))
        shapes = tuple((tensor.shape, tensor.dtype) for tensor in values)
        key = (repr(structure), tuple(packed.ints), tuple(packed.floats), bad.device, shapes)
        with self._lock:
            samples = self.samples.get(key)
            if samples is None and is_captured:
                self.not_kept = "shapes or numbers were first seen inside a capture, where no memory can be made"
                return
            if samples is None:
                names = [name for name, _, _ in outputs]
                packed.tensors.clear()
                samples = self.samples[key] = Samples(self.settings.keep, values, structure, packed, names)
            samples.record(bad, values)


def _position(given: list[torch.Tensor]) -> Position:
    """Where a call with these tensors is made: on the device of the first that is on a GPU, or on the current one."""
    device = next((tensor.device for tensor in given if tensor.is_cuda), None)
    # Tensors on a GPU may be inside an object.
    if device is None and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        device = torch.device("cuda")
    return NOWHERE if device is None else position(device)


#: What `validate` has made in this process, by name.
functions: dict[str, Validated] = {}
_naming = fork.Lock()


def validate(
    kernel: Function,
    reference: Function,
    *,
    rtol: Bound = None,
    atol: Bound = None,
    name: str | None = None,
    equal_nan: bool = False,
    equal_inf: bool = False,
    use: str = KERNEL,
    inplace: Iterable[str | int] | str | int = (),
    sample: int = 1,
    on_mismatch: str = RECORD,
    keep: int = 0,
    fake: Function | None = None,
) -> Function:
    """Compare a kernel with its reference at each call, also inside CUDA graphs: there at each replay.

    Both are called with the same arguments, one after the other, and compared with operations of the device only.
    Nothing waits; the counters are read by `streamshim.validation_report`.

    Args:
        kernel: any callable: a torch function, a compiled CuTe kernel, a function around a ctypes call.
        reference: a callable that takes the same arguments and gives the same structure of tensors.
        rtol, atol: the tolerances, as for `torch.isclose`: a number for all outputs, or a dict from an output's name
            ("output", "output[0]", "output['lse']", the name of an argument in ``inplace``) or a `torch.dtype` to a
            number. Without them, those of `torch.testing.assert_close` for each type.
        name: the name in reports; the kernel's own if None. A name that is taken gets a number.
        equal_nan: whether NaN equals NaN.
        equal_inf: whether an infinity equals the same infinity.
        use: whose result the caller gets, "kernel" or "reference".
        inplace: names or positions of the arguments, tensors, that both write to. The side whose result is used gets
            the caller's own, the other one a copy that is made before.
        sample: compare every so many calls. Eager calls between are not compared and cost nothing; of a captured call,
            every replay runs both and only the counting is left out.
        on_mismatch: "record", "warn" or "raise": what happens when a report is read, by `streamshim.validation_report`
            or every few seconds of eager calls, and at exit.
        keep: keep inputs and outputs of the first so many bad calls for each set of shapes and numbers, to be written
            to a file by `Validated.save_samples`.
        fake: called by torch.compile instead of the kernel, with tensors without values, for the shapes of its
            outputs; the reference if None.

    Returns:
        A `Validated`, called like the kernel; with ``STREAMSHIM_VALIDATE=off`` the kernel itself.

    Raises:
        TypeError, ValueError: for an argument that cannot be understood, or a value of ``STREAMSHIM_VALIDATE`` or
            ``STREAMSHIM_REPORT_SECONDS``.

    The returned function raises `ValidationError` where structure, shapes, types or devices of the two outputs differ,
    where one side writes to an argument that ``inplace`` does not name (as far as torch knows), and where a capture
    finds no memory for its counters.
    """
    for argument, function in (("kernel", kernel), ("reference", reference), *([("fake", fake)] if fake else [])):
        if not callable(function):
            raise TypeError(f"{argument} is {function!r}; accepted: a callable")
    checks.check_bounds(rtol, atol)
    checks.check_type("name", name, (str, type(None)))
    checks.check_type("equal_nan", equal_nan, (bool,))
    checks.check_type("equal_inf", equal_inf, (bool,))
    checks.check_choice("use", use, (KERNEL, REFERENCE))
    checks.check_choice("on_mismatch", on_mismatch, (RECORD, WARN, RAISE))
    checks.check_count("sample", sample, least=1)
    checks.check_count("keep", keep, least=0)
    places = checks.places(inplace, kernel)
    run = asked_for()
    if run is Run.OFF:
        return kernel
    from . import compiled, report

    compiled.define()
    report.write_at_exit()
    with _naming:
        unique = _unique(name or str(getattr(kernel, "__name__", type(kernel).__name__)))
        settings = Settings(unique, rtol, atol, equal_nan, equal_inf, use, places, sample, on_mismatch, keep)
        functions[unique] = made = Validated(kernel, reference, settings, run, fake or reference)
    return made


def _unique(name: str) -> str:
    return next(
        candidate
        for candidate in itertools.chain([name], (f"{name}#{n}" for n in itertools.count(2)))
        if candidate not in functions
    )
