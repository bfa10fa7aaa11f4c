"""Ends chat sessions on the workers that may keep pages for them."""

from __future__ import annotations

from weft.gateway.admission.authenticate import current_tenant
from weft.gateway.fleet.fleet import Fleet
from weft.gateway.validate import check_parameters, invalid


def end_session(fleet: Fleet, session_id: str, cache_salt: str | None) -> int:
    """Tells every decode worker that a session of the calling tenant has ended; returns the number
    of workers that were told. A worker whose Session is broken keeps at most pins of the chat,
    which expire. Raises InvalidRequest if the name or the salt is empty or too long.
    """
    if not session_id:
        raise invalid("session_id", "is empty")
    given = {"session_id": session_id, "cache_salt": cache_salt}
    check_parameters({name: one for name, one in given.items() if one is not None}, {}, 0)
    cache_salt = cache_salt or ""
    if (tenant := current_tenant.get()) is not None:
        cache_salt, session_id = tenant.salt(cache_salt), tenant.session(session_id)
    sessions = [worker.session for worker in fleet.workers("decode")]
    return sum(one.end_session(cache_salt, session_id) for one in sessions if one is not None)
