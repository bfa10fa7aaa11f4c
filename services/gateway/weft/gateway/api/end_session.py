"""Ends chat sessions on the workers that may keep pages for them."""

from __future__ import annotations

from weft.gateway.admission.authenticate import current_tenant, tenant_salt, tenant_session
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
    tenant = current_tenant.get()
    salt, own_id = tenant_salt(tenant, cache_salt), tenant_session(tenant, session_id)
    sessions = [worker.session for worker in fleet.workers("decode")]
    return sum(one.end_session(salt, own_id) for one in sessions if one is not None)
