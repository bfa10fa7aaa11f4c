"""Ends chat sessions on the workers that may keep pages for them."""

from __future__ import annotations

from weft.gateway.admission.authenticate import current_tenant
from weft.gateway.fleet.fleet import Fleet
from weft.gateway.validate import check_cache_salt, check_session_id, invalid


def end_session(fleet: Fleet, session_id: str, cache_salt: str) -> int:
    """Tells every decode worker that a session of the calling tenant has ended.

    Args:
        fleet: All workers.
        session_id: As in the chat's requests.
        cache_salt: As in the chat's requests.

    Returns:
        Number of workers that were told. A worker whose Session is broken keeps at most pins of the
        chat, which expire.

    Raises:
        InvalidRequest: The name is empty or too long, or the salt is.
    """
    if not session_id:
        raise invalid("session_id", "is empty")
    check_session_id(session_id)
    check_cache_salt(cache_salt)
    if (tenant := current_tenant.get()) is not None:
        cache_salt, session_id = tenant.salt(cache_salt), tenant.session(session_id)
    sessions = [worker.session for worker in fleet.workers("decode")]
    return sum(one.end_session(cache_salt, session_id) for one in sessions if one is not None)
