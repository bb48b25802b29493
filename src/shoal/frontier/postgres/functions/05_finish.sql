-- Ending leases: done, dead, or waiting for the next attempt.

-- A lease without _kind is done, and its _reason is a note. Items and children of a request that waits are ignored.
-- _chunks, _staged: numbers of uploaded chunks and their links. _uploads: whether there are any.
-- _redirected: its child continues the page.
-- From _status to _staged, an array may be empty: then all entries have the usual value (status 200, contacted, and no other
-- property).
-- Returns one row. states: the new state of each lease, or LOST, or ALREADY_DONE (under this token). added, refused: how
-- many of its children were queued and refused; null: none of any. first, id: the position, from 1, and the number of a
-- request that became done. incoming: how many links of the run are staged. done: how many of its requests are done; of two
-- calls, the later one has the higher number.
CREATE FUNCTION finish(
    _run integer, _offset double precision, _receipt bigint, _receipt_token bigint,
    _token bigint[], _fingerprint bytea[], _status integer[], _contacted boolean[], _redirected boolean[],
    _duplicates bigint[],
    _kind text[], _reason text[], _retry_in double precision[], _waits text[],
    _items integer[], _chunks integer[], _staged integer[], _uploads boolean,
    _item_of integer[], _item_at integer[], _item bytea[],
    _hosts text[], _child_of integer[], _child bytea[], _child_host integer[], _child_rank double precision[],
    _child_url text[], _child_payload bytea[],
    OUT states integer[], OUT added integer[], OUT refused integer[], OUT first integer, OUT id bigint,
    OUT incoming bigint, OUT done bigint
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    _now double precision := clock(_offset);
    _at double precision := real_clock(_offset);
    _most integer;
    _limit bigint;
    _room bigint;
    _redirects bigint[];
    _knows boolean;
    _sorted record;
    _w record;                                -- leases of requests that wait for their next attempt
    _h record;                                -- an entry for each lease; lost ones have the state LOST
    _new record;
    _full bigint[];
    _freed integer[];
    _total record;
    _last bigint;
    _incoming bigint := 0;
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
    SELECT NULL::integer[] AS nths, NULL::bigint[] AS ids, NULL::integer[] AS hosts, NULL::integer[] AS attempts,
        NULL::integer[] AS items, NULL::integer[] AS workers INTO _w;
    IF cardinality(_retry_in) > 0 THEN
        PERFORM 1 FROM held h WHERE h.token = ANY(_token) ORDER BY h.token FOR UPDATE;
        WITH waiting AS (
            UPDATE held SET state = {WAITING}, due = _now + s.retry_in, at = _at, status = s.status, begun = true
                FROM (
                    SELECT h.tid, u.nth, u.retry_in, coalesce(u.status, 200) AS status
                    FROM unnest(_token, _fingerprint, _retry_in, _status) WITH ORDINALITY
                        u(token, fingerprint, retry_in, status, nth)
                    CROSS JOIN LATERAL (SELECT h.*, h.ctid AS tid FROM held h WHERE h.token = u.token LIMIT 1) h
                    WHERE u.retry_in IS NOT NULL AND h.fingerprint = u.fingerprint AND h.run = _run
                        AND h.state = {LEASED} AND h.attempts < _most
                ) s
                WHERE held.ctid = s.tid
                RETURNING s.nth, held.*
        )
        SELECT array_agg(w.nth::integer) AS nths, array_agg(w.id) AS ids, array_agg(w.host) AS hosts,
            array_agg(w.attempts) AS attempts, array_agg(w.items) AS items, array_agg(w.worker) AS workers
            INTO _w FROM waiting w;
    END IF;
    SELECT array_agg(u.token) AS tokens, array_agg(u.nth::integer) AS nths INTO _sorted
        FROM (SELECT * FROM unnest(_token) WITH ORDINALITY u(token, nth) ORDER BY u.token) u;
    -- The index of tokens makes this lock the rows in order; the comparison of runs must not use another index.
    -- width_bucket() finds a place in a sorted array.
    WITH gone AS (
        DELETE FROM held h WHERE h.token = ANY(_token) AND h.run IS NOT DISTINCT FROM _run AND h.state = {LEASED}
            AND h.fingerprint = _fingerprint[_sorted.nths[width_bucket(h.token, _sorted.tokens)]]
            RETURNING _sorted.nths[width_bucket(h.token, _sorted.tokens)] AS nth, h.id, h.host, h.attempts, h.items,
                h.worker, h.at
    )
    SELECT array_agg(e.state) AS states, array_agg(CASE WHEN e.state IN ({DONE}, {DEAD}) THEN e.id ELSE -1 END) AS parents,
        array_agg(e.id) AS ids, array_agg(e.attempts) AS attempts, array_agg(e.items) AS items,
        array_agg(e.worker) AS workers, array_agg(e.at) AS leased_at,
        array_agg(e.host) FILTER (WHERE e.state <> {LOST}) AS hosts,
        array_agg(coalesce(_contacted[e.nth], true)) FILTER (WHERE e.state <> {LOST}) AS contacted
        INTO _h
        FROM (
            SELECT DISTINCT ON (e.nth) e.* FROM (
                SELECT g.nth, CASE WHEN _kind[g.nth] IS NULL THEN {DONE} ELSE {DEAD} END AS state, g.id, g.host,
                    g.attempts, g.items, g.worker, g.at
                FROM gone g
                UNION ALL
                SELECT w.nth, {WAITING}, w.id, w.host, w.attempts, w.items, w.worker, NULL
                FROM unnest(_w.nths, _w.ids, _w.hosts, _w.attempts, _w.items, _w.workers)
                    w(nth, id, host, attempts, items, worker)
                UNION ALL
                SELECT n.nth, {LOST}, NULL, NULL, NULL, NULL, NULL, NULL FROM generate_subscripts(_token, 1) n(nth)
            ) e
            ORDER BY e.nth, e.id              -- null last
        ) e;
    IF {LOST} = ANY(_h.states) THEN  -- perhaps a repeated call whose answer was lost
        FOR _total IN
            SELECT u.nth FROM unnest(_h.states, _token, _fingerprint, _kind) WITH ORDINALITY
                u(state, token, fingerprint, kind, nth)
            CROSS JOIN LATERAL (
                SELECT q.id FROM request q WHERE q.run = _run AND q.fingerprint = u.fingerprint LIMIT 1) q
            CROSS JOIN LATERAL (SELECT o.id, o.token, o.state FROM outcome o WHERE o.id = q.id LIMIT 1) o
            WHERE u.state = {LOST} AND u.kind IS NULL AND o.token = u.token AND o.state = {DONE}
        LOOP
            _h.states[_total.nth] := {ALREADY_DONE};
        END LOOP;
    END IF;
    states := _h.states;
    IF _uploads THEN
        _incoming := register_stages(_run, _token, _h.states, _h.ids, _chunks, _staged);
    END IF;

    SELECT NULL::bigint[] AS lanes, NULL::double precision[] AS ranks, NULL::bigint[] AS ids, NULL::bigint[] AS parents,
        NULL::bigint[] AS refused INTO _new;
    IF cardinality(_child) > 0 THEN
        IF _room IS NOT NULL THEN
            _redirects := ARRAY(SELECT u.id FROM unnest(_h.ids, _redirected) u(id, redirected) WHERE u.redirected);
        END IF;
        SELECT * INTO _new FROM enqueue(
            _run, _at, _hosts, _h.parents, _child_of, _child, _child_host, _child_rank, _child_url, _child_payload,
            _room, _limit, _redirects);
    END IF;
    IF _h.hosts IS NOT NULL THEN
        _freed := free_hosts(_h.hosts, _h.contacted, _now);
        _full := full_lanes(_freed);
        IF cardinality(_full) >= {MAX_FULL_LANES} THEN  -- perhaps not all: add those of the leases
            _full := ARRAY(
                SELECT unnest(_full)
                UNION
                SELECT l.id FROM unnest(_freed) u(host)
                CROSS JOIN LATERAL (SELECT l.id, l.place FROM lane l WHERE l.id = lane_key(_run, u.host) LIMIT 1) l
                WHERE l.place = {FULL});
        END IF;
    END IF;
    IF _new.ids IS NOT NULL OR cardinality(_full) > 0 THEN
        PERFORM fill_lanes(_new.lanes || _full, _new.ranks, _new.ids);
    END IF;
    IF cardinality(_full) > 0 THEN
        PERFORM place_lanes(_full, clock(_offset));
    END IF;

    INSERT INTO outcome (id, token, at, run, items, worker, seconds, status, attempts, state, kind, reason)
        SELECT u.id, u.token, _at, _run, u.before + coalesce(u.items, 0), u.worker, _at - u.leased_at,
            coalesce(u.status, 200), least(u.attempts, 32767), u.state, CASE u.state WHEN {DEAD} THEN u.kind ELSE '' END,
            CASE u.state WHEN {DEAD} THEN coalesce(u.reason, '') ELSE '' END
        FROM unnest(_h.ids, _token, _h.states, _status, _h.items, _items, _h.workers, _h.leased_at, _h.attempts, _kind,
                    _reason)
            u(id, token, state, status, before, items, worker, leased_at, attempts, kind, reason)
        WHERE u.state IN ({DONE}, {DEAD});
    IF cardinality(_reason) > 0 OR cardinality(_kind) > 0 THEN
        INSERT INTO event (request, at, worker, what, detail)
            SELECT u.id, _at, u.worker,
                CASE u.state WHEN {DONE} THEN {NOTE_EVENT} ELSE format({FAILED_EVENT}, u.attempts) END,
                coalesce(u.reason, '') || CASE u.state WHEN {WAITING} THEN coalesce(u.waits, '') ELSE '' END
            FROM unnest(_h.ids, _h.states, _h.workers, _h.attempts, _reason, _waits)
                u(id, state, worker, attempts, reason, waits)
            WHERE u.state IN ({WAITING}, {DEAD}) OR (u.state = {DONE} AND u.reason <> '');
    END IF;

    IF _new.ids IS NOT NULL OR _new.refused IS NOT NULL THEN
        added := array_fill(0, ARRAY[cardinality(_token)]);
        refused := added;
        FOR _total IN SELECT p.parent, count(*) AS n FROM unnest(_new.parents) p(parent) GROUP BY p.parent LOOP
            added[array_position(_h.parents, _total.parent)] := _total.n;
        END LOOP;
        FOR _total IN SELECT p.parent, count(*) AS n FROM unnest(_new.refused) p(parent) GROUP BY p.parent LOOP
            refused[array_position(_h.parents, _total.parent)] := _total.n;
        END LOOP;
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
        WHERE g.run = _run RETURNING g.items, g.incoming, g.done INTO _last, incoming, done;
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
    first := array_position(states, {DONE});
    id := _h.ids[first];
END
$$;

-- Make dead requests of these kinds ready; with _except, of all other kinds. Links that were refused return in the order in
-- which they would be leased, while there is room beside the others. _only: limit this to these fingerprints; null: no
-- limit. Returns how many.
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
            ORDER BY coalesce(q.rank, 0), q.id LIMIT _room - cardinality(_ids));
    END IF;
    WITH gone AS (
        DELETE FROM outcome o WHERE o.id = ANY(_ids) AND o.state = {DEAD} RETURNING o.*
    ), back AS (
        INSERT INTO ready (rank, id, at, lane, attempts, status, items)
            SELECT coalesce(q.rank, 0), q.id, _at, lane_key(q.run, q.host), 0, g.status, g.items FROM gone g
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
        PERFORM fill_lanes(_new.lanes, _new.ranks, _new.ids);
        UPDATE ledger g SET ready = g.ready + _count, dead = g.dead - _count WHERE g.run = _run;
        IF NOT FOUND THEN
            PERFORM refuse({NO_RUN}, 'the run was deleted');
        END IF;
    END IF;
    RETURN _count;
END
$$;
