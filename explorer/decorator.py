"""`tricomm.checked`: a decorator that checks a test function under many schedules."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from tricomm.communicator import Communicator
from tricomm.errors import InvalidArgument
from tricomm.explorer.campaign import check
from tricomm.explorer.report.report import digest, nothing_examined
from tricomm.explorer.simulation import runs_later

_BY_NAME = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)


def checked(*, world_size: int, **settings: Any) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Turn a function of a communicator into a test that passes if `check` finds nothing in it.

    `settings` are further arguments of `check`. The function's first parameter is the communicator; the test has the
    others, for fixtures and `pytest.mark.parametrize`, which give all ranks the same objects. A function without a
    parameter that can be given by position is a program over torch's symmetric memory. The test raises `AssertionError`
    with the report's text, or because no kernel accessed symmetric memory, so that nothing was examined.

    The test runs under pytest and unittest, or as a plain call.
    """

    def decorate(body: Callable[..., Any]) -> Callable[..., None]:
        parameters = list(inspect.signature(body).parameters.values())
        of_class = bool(parameters) and parameters[0].name in ("self", "cls")
        own, rest = parameters[:of_class], parameters[of_class:]
        program = not rest or rest[0].kind in _BY_NAME
        if runs_later(body):  # the wrapper below is an ordinary function, so `check` cannot detect this
            raise InvalidArgument(f"{body.__qualname__} is a generator or a coroutine: calling it runs nothing")
        file = inspect.unwrap(body).__code__.co_filename
        subject = {"file": file, "function": body.__qualname__, "sha256": digest(file)}

        @functools.wraps(body)
        def test(*args: Any, **kwargs: Any) -> None:
            __tracebackhide__ = True  # of pytest
            first, others = args[:of_class], args[of_class:]

            def of_program() -> Any:
                return body(*args, **kwargs)

            def of_ranks(comm: Communicator) -> Any:
                return body(*first, comm, *others, **kwargs)

            run: Any = of_program if program else of_ranks
            run.subject, run.function = subject, body
            report = check(run, world_size, **settings)
            if not report.ok:
                raise AssertionError(str(report))
            if not report.steps:
                raise AssertionError(f"{body.__qualname__}: {nothing_examined(report)}")

        named: Any = test
        named.__signature__ = inspect.Signature(own + rest[not program :])
        named.checked_body = body  # for `tricomm check FILE:FUNCTION`
        return test

    return decorate
