-- Ending leases: done, dead, or waiting for the next attempt.

-- A lease without _kind is done, and its _reason is a note. Items and children of a request that waits are ignored.
-- _chunks, _staged: numbers of uploaded chunks and their links. _uploads: whether there are any.
-- _redirected: its child continues the page.
-- Returns a row for each valid lease: its position from 1, the new state (or ALREADY_DONE, under this token), how
-- many children were queued and refused, the request's number, how many links of the run are staged, and how many requests
-- are done. The last number orders completions: the later of two calls has the higher one.
CREATE FUNCTION finish(
    _run integer, _offset double precision, _receipt bigint, _receipt_token bigint,
    _token bigint[], _fingerprint bytea[], _status integer[], _contacted boolean[], _redirected boolean[],
    _duplicates bigint[],
    _kind text[], _reason text[], _retry_in double precision[], _waits text[],
    _items integer[], _chunks integer[], _staged integer[], _uploads boolean,
    _item_of integer[], _item_at integer[], _item bytea[],
    _hosts text[], _child_of integer[], _child bytea[], _child_host integer[], _child_rank double precision[],
    _child_url text[], _child_payload bytea[]
) RETURNS TABLE (
    nth bigint, state smallint, added integer, refused integer, id bigint, incoming bigint, done bigint)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    _now double precision;
    _at double precision := real_clock(_offset);
    _most integer;
    _limit bigint;
    _room bigint;
    _redirects bigint[];
    _knows boolean;
    _h record;                                -- an entry for each lease; lost ones have the state LOST
    _new record;
    _full integer[];
    _added integer[] := array_fill(0, ARRAY[cardinality(_token)]);
    _refused integer[] := _added;
    _total record;
    _last bigint;
    _incoming bigint := 0;
    _done bigint;
BEGIN
    SELECT r.max_attempts, r.link_limit, _receipt IS NULL OR EXISTS (
            SELECT FROM outcome o WHERE o.id = _receipt AND o.token = _receipt_token AND o.state = {DONE})
        INTO _most, _limit, _knows FROM run r WHERE r.id = _run AND NOT r.deleting;
    IF _knows IS NOT TRUE THEN                -- null: there is no such run
        PERFORM check_run(_run);
        PERFORM check_receipt(_run, _receipt, _receipt_token);
    END IF;
    IF _limit IS NOT NULL THEN
        _room := room_for_links(_run, _limit);
    END IF;
    PERFORM 1 FROM held h WHERE h.token = ANY(_token) ORDER BY h.token FOR UPDATE;
    SELECT array_agg(e.state) AS states,
        array_agg(CASE WHEN e.state IN ({DONE}, {DEAD}) THEN e.id ELSE -1 END) AS parents,
        array_agg(e.id) AS ids, array_agg(e.host) AS hosts, array_agg(e.attempts) AS attempts,
        array_agg(e.items) AS items, array_agg(e.lane) AS lanes, array_agg(e.worker) AS workers,
        array_agg(e.at) AS leased_at
        INTO _h
        FROM (
            SELECT CASE WHEN h.id IS NULL THEN {LOST} WHEN u.kind IS NULL THEN {DONE}
                    WHEN u.retry_in IS NOT NULL AND h.attempts < _most THEN {WAITING} ELSE {DEAD} END AS state,
                coalesce(h.id, -1) AS id, coalesce(h.host, -1) AS host, coalesce(h.attempts, 0) AS attempts,
                coalesce(h.items, 0) AS items, h.lane, h.worker, h.at
            FROM unnest(_token, _fingerprint, _kind, _retry_in) WITH ORDINALITY
                u(token, fingerprint, kind, retry_in, nth)
            LEFT JOIN LATERAL (SELECT * FROM held h WHERE h.token = u.token LIMIT 1) h
                ON h.fingerprint = u.fingerprint AND h.run = _run AND h.state = {LEASED}
            ORDER BY u.nth
        ) e;
    IF {LOST} = ANY(_h.states) THEN  -- perhaps a repeated call whose answer was lost
        FOR _total IN
            SELECT u.nth, o.id FROM unnest(_h.states, _token, _fingerprint, _kind) WITH ORDINALITY
                u(state, token, fingerprint, kind, nth)
            CROSS JOIN LATERAL (
                SELECT q.id FROM request q WHERE q.run = _run AND q.fingerprint = u.fingerprint LIMIT 1) q
            CROSS JOIN LATERAL (SELECT o.id, o.token, o.state FROM outcome o WHERE o.id = q.id LIMIT 1) o
            WHERE u.state = {LOST} AND u.kind IS NULL AND o.token = u.token AND o.state = {DONE}
        LOOP
            _h.states[_total.nth] := {ALREADY_DONE};
            _h.ids[_total.nth] := _total.id;
        END LOOP;
    END IF;
    IF _uploads THEN
        _incoming := register_stages(_run, _token, _h.states, _h.ids, _chunks, _staged);
    END IF;

    SELECT NULL::integer[] AS lanes, NULL::bigint[] AS ids, NULL::bigint[] AS parents, NULL::bigint[] AS refused
        INTO _new;
    IF cardinality(_child) > 0 THEN
        IF _room IS NOT NULL THEN
            _redirects := ARRAY(SELECT u.id FROM unnest(_h.ids, _redirected) u(id, redirected) WHERE u.redirected);
        END IF;
        SELECT * INTO _new FROM enqueue(
            _run, _at, _hosts, _h.parents, _child_of, _child, _child_host, _child_rank, _child_url, _child_payload,
            _room, _limit, _redirects);
    END IF;
    PERFORM lock_hosts(_h.hosts);
    _full := full_lanes(_h.hosts) || ARRAY(  -- and the lanes of the leases
        SELECT l.id FROM (SELECT DISTINCT u.lane FROM unnest(_h.lanes) u(lane)) u
        CROSS JOIN LATERAL (SELECT l.id, l.place FROM lane l WHERE l.id = u.lane LIMIT 1) l WHERE l.place = {FULL});
    PERFORM lock_lanes(_new.lanes || _full);
    _now := clock(_offset);

    DELETE FROM held h WHERE h.token = ANY(ARRAY(
        SELECT u.token FROM unnest(_token, _h.states) u(token, state) WHERE u.state IN ({DONE}, {DEAD})));
    INSERT INTO outcome (id, token, at, run, items, worker, seconds, status, attempts, state, kind, reason)
        SELECT u.id, u.token, _at, _run, u.before + u.items, u.worker, _at - u.leased_at, u.status,
            least(u.attempts, 32767), u.state, CASE u.state WHEN {DEAD} THEN u.kind ELSE '' END,
            CASE u.state WHEN {DEAD} THEN u.reason ELSE '' END
        FROM unnest(_h.ids, _token, _h.states, _status, _h.items, _items, _h.workers, _h.leased_at, _h.attempts, _kind,
                    _reason)
            u(id, token, state, status, before, items, worker, leased_at, attempts, kind, reason)
        WHERE u.state IN ({DONE}, {DEAD});
    IF {WAITING} = ANY(_h.states) THEN
        UPDATE held SET state = {WAITING}, due = _now + s.retry_in, at = _at, status = s.status, begun = true
            FROM (
                SELECT h.tid, u.retry_in, u.status
                FROM unnest(_token, _h.states, _retry_in, _status) u(token, state, retry_in, status)
                CROSS JOIN LATERAL (SELECT h.ctid AS tid FROM held h WHERE h.token = u.token LIMIT 1) h
                WHERE u.state = {WAITING}
            ) s
            WHERE held.ctid = s.tid;
    END IF;
    INSERT INTO event (request, at, worker, what, detail)
        SELECT u.id, _at, u.worker, CASE u.state WHEN {DONE} THEN {NOTE_EVENT} ELSE format({FAILED_EVENT}, u.attempts) END,
            CASE u.state WHEN {WAITING} THEN u.reason || u.waits ELSE u.reason END
        FROM unnest(_h.ids, _h.states, _h.workers, _h.attempts, _reason, _waits)
            u(id, state, worker, attempts, reason, waits)
        WHERE u.state IN ({WAITING}, {DEAD}) OR (u.state = {DONE} AND u.reason <> '');

    PERFORM free_hosts(_h.hosts, _contacted, _now);
    IF _new.ids IS NOT NULL THEN
        PERFORM fill_lanes(_new.lanes, _new.ranks, _new.ids);
        FOR _total IN SELECT p.parent, count(*) AS n FROM unnest(_new.parents) p(parent) GROUP BY p.parent LOOP
            _added[array_position(_h.parents, _total.parent)] := _total.n;
        END LOOP;
    END IF;
    IF _new.refused IS NOT NULL THEN
        FOR _total IN SELECT p.parent, count(*) AS n FROM unnest(_new.refused) p(parent) GROUP BY p.parent LOOP
            _refused[array_position(_h.parents, _total.parent)] := _total.n;
        END LOOP;
    END IF;
    IF cardinality(_full) > 0 THEN
        PERFORM place_lanes(_full, _now);
    END IF;

    SELECT count(*) FILTER (WHERE u.state = {WAITING}) AS waiting, count(*) FILTER (WHERE u.state = {DONE}) AS done,
        count(*) FILTER (WHERE u.state = {DEAD}) AS dead,
        coalesce(sum(u.duplicates) FILTER (WHERE u.state IN ({DONE}, {DEAD})), 0) - coalesce(cardinality(_new.ids), 0)
            - coalesce(cardinality(_new.refused), 0) AS duplicates,
        coalesce(sum(u.items) FILTER (WHERE u.state IN ({DONE}, {DEAD})), 0) AS items,
        coalesce(cardinality(_new.ids), 0) AS new, coalesce(cardinality(_new.refused), 0) AS refused
        INTO _total FROM unnest(_h.states, _duplicates, _items) u(state, duplicates, items);
    UPDATE ledger g SET
        pushed = g.pushed + _total.new + _total.refused, ready = g.ready + _total.new,
        waiting = g.waiting + _total.waiting,
        leased = g.leased - _total.waiting - _total.done - _total.dead, done = g.done + _total.done,
        dead = g.dead + _total.dead + _total.refused, duplicates = g.duplicates + _total.duplicates, items = g.items + _total.items,
        incoming = g.incoming + _incoming
        WHERE g.run = _run RETURNING g.items, g.incoming, g.done INTO _last, _incoming, _done;
    IF NOT FOUND THEN
        PERFORM refuse({NO_RUN}, 'the run was deleted');
    END IF;
    IF _total.items > 0 THEN
        INSERT INTO item (run, position, seq, token, fingerprint, payload)
            SELECT _run, _h.items[u.owner] + u.at, _last - _total.items + row_number() OVER (ORDER BY u.nth),
                _token[u.owner], _fingerprint[u.owner], u.payload
            FROM unnest(_item_of, _item_at, _item) WITH ORDINALITY u(owner, at, payload, nth)
            WHERE _h.states[u.owner] IN ({DONE}, {DEAD});
    END IF;
    RETURN QUERY
        SELECT u.nth, u.state::smallint, u.added, u.refused, u.id, _incoming, _done
        FROM unnest(_h.states, _added, _refused, _h.ids) WITH ORDINALITY u(state, added, refused, id, nth)
        WHERE u.state <> {LOST};
END
$$;

-- Make dead requests of these kinds ready; with _except, of all other kinds. Links that were refused return in the order in
-- which they would be leased, while there is room beside the others. _only: fingerprints of the requests that are meant; NULL
-- for all. Returns how many.
CREATE FUNCTION retry_dead(_run integer, _offset double precision, _kinds text[], _except boolean, _only bytea[])
RETURNS bigint LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    _at double precision := real_clock(_offset);
    _room bigint := room_for_links(_run, (SELECT r.link_limit FROM run r WHERE r.id = _run));
    _named bigint[];
    _ids bigint[];
    _new record;
    _count bigint;
BEGIN
    IF _only IS NULL THEN
        _ids := ARRAY(
            SELECT o.id FROM outcome o WHERE o.run = _run AND o.state = {DEAD} AND o.kind <> {FULL_KIND}
                AND (o.kind = ANY(_kinds)) <> _except);
    ELSE
        _named := ARRAY(SELECT q.id FROM request q WHERE q.run = _run AND q.fingerprint = ANY(_only));
        _ids := ARRAY(
            SELECT o.id FROM outcome o WHERE o.id = ANY(_named) AND o.state = {DEAD} AND o.kind <> {FULL_KIND}
                AND (o.kind = ANY(_kinds)) <> _except);
    END IF;
    IF _room < cardinality(_ids) THEN
        _room := cardinality(_ids);
    END IF;
    IF ({FULL_KIND} = ANY(_kinds)) <> _except THEN
        _ids := _ids || ARRAY(
            SELECT o.id FROM outcome o JOIN request q ON q.id = o.id
            WHERE o.run = _run AND o.state = {DEAD} AND o.kind = {FULL_KIND}
                AND (_only IS NULL OR o.id = ANY(_named))
            ORDER BY q.rank, q.id LIMIT _room - cardinality(_ids));
    END IF;
    WITH gone AS (
        DELETE FROM outcome o WHERE o.id = ANY(_ids) AND o.state = {DEAD} RETURNING o.*
    ), back AS (
        INSERT INTO ready (rank, id, at, lane, attempts, status, items)
            SELECT q.rank, q.id, _at, q.lane, 0, g.status, g.items FROM gone g
            CROSS JOIN LATERAL (SELECT * FROM request q WHERE q.id = g.id LIMIT 1) q
            RETURNING ready.lane, ready.rank, ready.id
    ), noted AS (
        INSERT INTO event (request, at, worker, what, detail)
            SELECT g.id, _at, 0, {RETRIED_EVENT},
                CASE g.kind WHEN {FULL_KIND} THEN {ADMITTED_DETAIL} ELSE {RETRIED_DETAIL} END
            FROM gone g
    )
    SELECT array_agg(b.lane) AS lanes, array_agg(b.rank) AS ranks, array_agg(b.id) AS ids INTO _new FROM back b;
    _count := coalesce(cardinality(_new.ids), 0);
    IF _count > 0 THEN
        PERFORM lock_lanes(_new.lanes);
        PERFORM fill_lanes(_new.lanes, _new.ranks, _new.ids);
        UPDATE ledger g SET ready = g.ready + _count, dead = g.dead - _count WHERE g.run = _run;
        IF NOT FOUND THEN
            PERFORM refuse({NO_RUN}, 'the run was deleted');
        END IF;
    END IF;
    RETURN _count;
END
$$;
