-- Leases that are renewed, reissued, released or lost.

-- Return requests to the queue: their lease expired or was released unused, or they have waited for their retry. Requests
-- without attempts left are dead. An expired lease that was not begun is unused too, and nobody contacted its host. The
-- caller has locked the requests, their hosts and lanes, and updates the ledgers by the returned counts.
CREATE FUNCTION requeue(
    _tokens bigint[], _released boolean, _contacted boolean, _now double precision, _at double precision
) RETURNS TABLE (run integer, ready bigint, waiting bigint, leased bigint, dead bigint) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    _gone record;
BEGIN
    WITH gone AS (
        DELETE FROM held h WHERE h.token = ANY(_tokens) RETURNING h.*, _released OR NOT h.begun AS unused
    ), judged AS MATERIALIZED (
        SELECT g.*, g.state = {LEASED} AND NOT g.unused AND g.attempts >= r.max_attempts AS dies,
            format({LOST_REASON}, g.attempts) AS reason
        FROM gone g CROSS JOIN LATERAL (SELECT r.max_attempts FROM run r WHERE r.id = g.run LIMIT 1) r
    ), back AS (
        INSERT INTO ready (rank, id, at, lane, attempts, status, items)
            SELECT j.rank, j.id, CASE j.state WHEN {LEASED} THEN _at ELSE j.at END, lane_key(j.run, j.host),
                j.attempts - j.unused::integer, j.status, j.items
            FROM judged j WHERE NOT j.dies
    ), died AS (
        INSERT INTO outcome (id, token, at, run, items, worker, seconds, status, attempts, state, kind, reason)
            SELECT j.id, j.token, _at, j.run, j.items, j.worker, _at - j.at, j.status,
                least(j.attempts, 32767), {DEAD}, {LOST_KIND}, j.reason
            FROM judged j WHERE j.dies
    ), noted AS (
        INSERT INTO event (request, at, worker, what, detail)
            SELECT j.id, _at, j.worker, {LOST_EVENT}, j.reason FROM judged j WHERE j.state = {LEASED} AND NOT j.unused
    )
    SELECT array_agg(lane_key(j.run, j.host)) FILTER (WHERE NOT j.dies) AS lanes,
        array_agg(j.rank) FILTER (WHERE NOT j.dies) AS ranks,
        array_agg(j.id) FILTER (WHERE NOT j.dies) AS ids,
        array_agg(j.host) FILTER (WHERE j.state = {LEASED}) AS hosts,
        array_agg(_contacted AND (_released OR j.begun)) FILTER (WHERE j.state = {LEASED}) AS contacted,
        array_agg(j.run) AS runs, array_agg(j.state) AS states, array_agg(j.dies) AS dies
        INTO _gone FROM judged j;
    PERFORM free_hosts(_gone.hosts, _gone.contacted, _now);
    PERFORM fill_lanes(_gone.lanes, _gone.ranks, _gone.ids);
    DELETE FROM chunk c WHERE c.token = ANY(_tokens);
    RETURN QUERY
        SELECT u.run, count(*) FILTER (WHERE NOT u.dies), count(*) FILTER (WHERE u.state = {WAITING}),
            count(*) FILTER (WHERE u.state = {LEASED}), count(*) FILTER (WHERE u.dies)
        FROM unnest(_gone.runs, _gone.states, _gone.dies) u(run, state, dies) GROUP BY u.run;
END
$$;

-- The same for leases of one run, including their hosts, lanes and ledger. The caller has locked the leases.
CREATE FUNCTION end_leases(
    _tokens bigint[], _hosts integer[], _lanes bigint[], _released boolean, _contacted boolean,
    _offset double precision
) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    _back record;
    _now double precision;
BEGIN
    PERFORM lock_hosts(_hosts);
    _lanes := _lanes || full_lanes(ARRAY(SELECT DISTINCT u.host FROM unnest(_hosts) u(host)));
    PERFORM lock_lanes(_lanes);
    _now := clock(_offset);
    SELECT * INTO _back FROM requeue(_tokens, _released, _contacted, _now, real_clock(_offset));
    PERFORM place_lanes(_lanes, _now);
    UPDATE ledger g SET ready = g.ready + _back.ready, leased = g.leased - _back.leased, dead = g.dead + _back.dead
        WHERE g.run = _back.run;
END
$$;

CREATE FUNCTION renew(
    _run integer, _offset double precision, _token bigint[], _fingerprint bytea[], _ttl double precision
) RETURNS TABLE (nth bigint) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    _now double precision;
BEGIN
    PERFORM 1 FROM held h WHERE h.token = ANY(_token) ORDER BY h.token FOR NO KEY UPDATE;
    _now := clock(_offset);
    RETURN QUERY
        UPDATE held SET due = _now + _ttl
            FROM (
                SELECT h.tid, u.nth FROM unnest(_token, _fingerprint) WITH ORDINALITY u(token, fingerprint, nth)
                CROSS JOIN LATERAL (SELECT h.*, h.ctid AS tid FROM held h WHERE h.token = u.token LIMIT 1) h
                WHERE h.fingerprint = u.fingerprint AND h.run = _run AND h.state = {LEASED}
            ) s
            WHERE held.ctid = s.tid
            RETURNING s.nth;
END
$$;

-- Give valid leases new tokens, which the client derived from its nonce. A lease that has its new token already is valid
-- too: the call is a repeat. Leases stay with their slot. Returns the positions of the valid ones, from 1.
CREATE FUNCTION reissue(
    _run integer, _offset double precision, _token bigint[], _new bigint[], _fingerprint bytea[], _ttl double precision
) RETURNS TABLE (nth bigint) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    _now double precision;
BEGIN
    PERFORM 1 FROM held h WHERE h.token = ANY(_token) ORDER BY h.token FOR UPDATE;
    -- Second, as a repeat has waited above for the first call to end. (Two calls for the same leases, some of them reissued
    -- already, may deadlock here; then one of them is retried.)
    PERFORM 1 FROM held h WHERE h.token = ANY(_new) ORDER BY h.token FOR UPDATE;
    _now := clock(_offset);
    DELETE FROM chunk c WHERE c.token = ANY(_token);
    RETURN QUERY
        UPDATE held SET token = s.new, due = _now + _ttl, begun = true
            FROM (
                SELECT DISTINCT ON (h.id) h.tid, u.new, u.nth  -- each request once: the second is stale
                FROM unnest(_token, _new, _fingerprint) WITH ORDINALITY u(token, new, fingerprint, nth)
                CROSS JOIN LATERAL (
                    SELECT h.*, h.ctid AS tid FROM held h WHERE h.token = u.token
                    UNION ALL
                    SELECT h.*, h.ctid FROM held h WHERE h.token = u.new
                    LIMIT 1
                ) h
                WHERE h.fingerprint = u.fingerprint AND h.run = _run AND h.state = {LEASED}
                ORDER BY h.id, u.nth
            ) s
            WHERE held.ctid = s.tid
            RETURNING s.nth;
END
$$;

-- Returns the positions of the released leases, from 1.
CREATE FUNCTION release(
    _run integer, _offset double precision, _receipt bigint, _receipt_token bigint,
    _token bigint[], _fingerprint bytea[], _contacted boolean
) RETURNS TABLE (nth bigint) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    _held record;
BEGIN
    PERFORM check_receipt(_run, _receipt, _receipt_token);
    PERFORM 1 FROM held h WHERE h.token = ANY(_token) ORDER BY h.token FOR UPDATE;
    SELECT array_agg(h.token) AS tokens, array_agg(u.nth) AS nths, array_agg(h.host) AS hosts,
        array_agg(lane_key(h.run, h.host)) AS lanes
        INTO _held
        FROM unnest(_token, _fingerprint) WITH ORDINALITY u(token, fingerprint, nth)
        CROSS JOIN LATERAL (SELECT * FROM held h WHERE h.token = u.token LIMIT 1) h
        WHERE h.fingerprint = u.fingerprint AND h.run = _run AND h.state = {LEASED};
    IF _held.tokens IS NULL THEN
        RETURN;
    END IF;
    PERFORM end_leases(_held.tokens, _held.hosts, _held.lanes, true, _contacted, _offset);
    RETURN QUERY SELECT unnest(_held.nths);
END
$$;
