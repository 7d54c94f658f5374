"""A query that every request makes, written as SQL once per thread instead of once per request.

Django takes longer to write such a statement than PostgreSQL to answer it, and always writes the same one. What comes
out are ordinary rows with their relations. Only for queries whose text never depends on their values: it must never be
given a value that Django would treat in a special way (None, which becomes IS NULL).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from django.db import connection
from django.db.models import Model, QuerySet
from django.db.models.query import get_related_populators

M = TypeVar("M", bound=Model)


class Prepared(Generic[M]):
    """A query of one value. `build` gets a stand-in of the value's kind; its queryset must compare with it by `=`."""

    def __init__(self, build: Callable[[Any], QuerySet[M]], stand_in: object) -> None:
        self._build, self._stand_in = build, stand_in
        self._written = threading.local()

    def rows(self, value: Any) -> list[M]:
        """The rows for a value, as `build(value)` would give them."""
        compiler, sql, params = self._statement()
        with connection.cursor() as cursor:
            cursor.execute(sql, [value if item == self._stand_in else item for item in params])
            found = cursor.fetchall()
        return [self._row(compiler, row) for row in compiler.results_iter([found])]

    def _statement(self) -> tuple[Any, str, tuple[Any, ...]]:
        if not hasattr(self._written, "statement"):
            compiler = self._build(self._stand_in).query.get_compiler("default")
            sql, params = compiler.as_sql()
            if self._stand_in not in params:
                raise ValueError("the query does not compare with the value")
            self._written.statement = (compiler, sql, tuple(params))
        statement: tuple[Any, str, tuple[Any, ...]] = self._written.statement
        return statement

    def _row(self, compiler: Any, row: Any) -> M:
        """As Django's `ModelIterable` makes one."""
        info = compiler.klass_info
        start, end = info["select_fields"][0], info["select_fields"][-1] + 1
        names = [column[0].target.attname for column in compiler.select[start:end]]
        made: M = info["model"].from_db("default", names, row[start:end])
        for populator in get_related_populators(info, compiler.select, "default"):  # type: ignore[call-arg]
            populator.populate(row, made)
        for name, position in compiler.annotation_col_map.items():
            setattr(made, name, row[position])
        return made
