-- Ending leases: done, dead, or waiting for the next attempt.

-- A lease without _kind is done, and its _reason is a note. Items and children of a request that waits are ignored.
-- _chunks, _staged: numbers of uploaded chunks and their links. _uploads: whether there are any.
-- _redirected: its child continues the page.
-- _cookie_key: of a document with cookies of the run to write first, see store_cookies; null: none. If it has another version,
-- nothing is changed, and the result is null except for cookies.
-- From _status to _staged, an array may be empty: then all entries have the usual value (status 200, contacted, and no other
-- property).
-- Returns one row. states: the new state of each lease, or LOST, or ALREADY_DONE (under this token). added, refused: how
-- many of its children were queued and refused; null: none of any. first, id: the position, from 1, and the number of a
-- request that became done. incoming: how many links of the run are staged. done: how many of its requests are done; of two
-- calls, the later one has the higher number. cookies: the new version of the run's cookies; 0 if they were not written.
CREATE FUNCTION finish(
    _run integer, _offset double precision, _receipt bigint, _receipt_token bigint,
    _cookie_key bytea, _cookie_value bytea, _cookie_replaces bytea, _cookie_version bytea,
    _token bigint[], _fingerprint bytea[], _status integer[], _contacted boolean[], _redirected boolean[],
    _duplicates bigint[], _item_errors integer[],
    _kind text[], _reason text[], _retry_in double precision[], _waits text[],
    _items integer[], _chunks integer[], _staged integer[], _uploads boolean,
    _item_of integer[], _item_at integer[], _item bytea[],
    _hosts text[], _child_of integer[], _child bytea[], _child_host integer[], _child_rank double precision[],
    _child_url text[], _child_payload bytea[],
    OUT states integer[], OUT added integer[], OUT refused integer[], OUT first integer, OUT id bigint,
    OUT incoming bigint, OUT done bigint, OUT cookies bigint
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    _now double precision;
    _at double precision;
    _seen double precision;                   -- these are parts of clock()
    _skew double precision;
    _most integer;
    _limit bigint;
    _room bigint;
    _redirects bigint[];
    _knows boolean;
    _waiting integer := 0;
    _w_nths integer[];                        -- leases of requests that wait for their next attempt
    _w_ids bigint[];
    _w_hosts integer[];
    _w_attempts integer[];
    _w_items integer[];
    _w_workers integer[];
    _h record;                                -- an entry for each lease, lost ones have the state LOST; and sums
    _parents bigint[];                        -- numbers of leases that end; -1: the children are ignored
    _new record;
    _added integer := 0;
    _refused integer := 0;
    _full bigint[];
    _freed record;
    _is_shared boolean := false;              -- other runs want one of the hosts
    _each record;
    _last bigint;
    _incoming bigint := 0;
BEGIN
    SELECT r.max_attempts, r.link_limit, c.seen, c.skew, _receipt IS NULL OR EXISTS (
            SELECT FROM outcome o WHERE o.id = _receipt AND o.token = _receipt_token AND o.state = {DONE})
        INTO _most, _limit, _seen, _skew, _knows
        FROM run r LEFT JOIN clock_state c ON c.id = 1 WHERE r.id = _run AND NOT r.deleting;
    IF _knows IS NOT TRUE THEN                -- null: there is no such run
        PERFORM check_run(_run);
        PERFORM check_receipt(_run, _receipt, _receipt_token);
    END IF;
    IF _cookie_key IS NOT NULL THEN
        cookies := store_cookies(_run, _cookie_key, _cookie_value, _cookie_replaces, _cookie_version);
        IF cookies = 0 THEN
            RETURN;
        END IF;
    END IF;
    _at := real_clock(_offset);
    _now := CASE WHEN _at BETWEEN _seen AND _seen + 1 THEN _at + _skew ELSE clock(_offset) END;  -- mostly without a call
    IF _limit IS NOT NULL THEN
        _room := room_for_links(_run, _limit);
    END IF;
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
        SELECT array_agg(w.nth::integer), array_agg(w.id), array_agg(w.host), array_agg(w.attempts), array_agg(w.items),
            array_agg(w.worker)
            INTO _w_nths, _w_ids, _w_hosts, _w_attempts, _w_items, _w_workers FROM waiting w;
        _waiting := coalesce(cardinality(_w_nths), 0);
    END IF;
    -- The index of tokens makes this lock the rows in order; the comparison of runs must not use another index.
    -- width_bucket() finds a place in a sorted array.
    WITH sorted AS MATERIALIZED (
        SELECT array_agg(u.token) AS tokens, array_agg(u.nth::integer) AS nths
        FROM (SELECT * FROM unnest(_token) WITH ORDINALITY u(token, nth) ORDER BY u.token) u
    ), gone AS (
        DELETE FROM held h WHERE h.token = ANY(_token) AND h.run IS NOT DISTINCT FROM _run AND h.state = {LEASED}
            AND h.fingerprint = _fingerprint[
                (SELECT s.nths FROM sorted s)[width_bucket(h.token, (SELECT s.tokens FROM sorted s))]]
            RETURNING (SELECT s.nths FROM sorted s)[width_bucket(h.token, (SELECT s.tokens FROM sorted s))] AS nth,
                h.id, h.token, h.host, h.attempts, h.items, h.worker, h.at
    ), judged AS MATERIALIZED (
        SELECT g.*, CASE WHEN _kind[g.nth] IS NULL THEN {DONE} ELSE {DEAD} END AS state FROM gone g ORDER BY g.nth
    ), ended AS (
        INSERT INTO outcome (id, token, at, run, items, worker, seconds, status, attempts, state, kind, reason)
            SELECT j.id, j.token, _at, _run, j.items + coalesce(_items[j.nth], 0), j.worker, _at - j.at,
                coalesce(_status[j.nth], 200), least(j.attempts, 32767), j.state, coalesce(_kind[j.nth], ''),
                CASE j.state WHEN {DEAD} THEN coalesce(_reason[j.nth], '') ELSE '' END
            FROM judged j
    )
    SELECT array_agg(j.nth) AS nths, array_agg(j.state) AS states, array_agg(j.id) AS ids, array_agg(j.host) AS hosts,
        array_agg(j.attempts) AS attempts, array_agg(j.items) AS items, array_agg(j.worker) AS workers,
        count(*) AS ended, count(_kind[j.nth]) AS dead, coalesce(sum(_duplicates[j.nth]), 0) AS duplicates,
        coalesce(sum(_items[j.nth]), 0) AS new_items, count(*) FILTER (WHERE _redirected[j.nth]) AS redirects,
        coalesce(sum(_item_errors[j.nth]), 0) AS item_errors
        INTO _h FROM judged j;
    _parents := _h.ids;
    IF _h.ended < cardinality(_token) THEN    -- add those that wait or are lost
        SELECT array_agg(e.nth) AS nths, array_agg(e.state) AS states, array_agg(e.id) AS ids,
            array_agg(e.host) FILTER (WHERE e.state <> {LOST}) AS hosts,
            array_agg(e.attempts) AS attempts, array_agg(e.items) AS items, array_agg(e.worker) AS workers,
            _h.ended AS ended, _h.dead AS dead, _h.duplicates AS duplicates, _h.new_items AS new_items,
            _h.redirects AS redirects, _h.item_errors AS item_errors,
            array_agg(CASE WHEN e.state IN ({DONE}, {DEAD}) THEN e.id ELSE -1 END) AS parents,
            array_agg(coalesce(_contacted[e.nth], true)) FILTER (WHERE e.state <> {LOST}) AS contacted
            INTO _h
            FROM (
                SELECT DISTINCT ON (e.nth) e.* FROM (
                    SELECT * FROM unnest(_h.nths, _h.states, _h.ids, _h.hosts, _h.attempts, _h.items, _h.workers)
                        g(nth, state, id, host, attempts, items, worker)
                    UNION ALL
                    SELECT w.nth, {WAITING}, w.id, w.host, w.attempts, w.items, w.worker
                    FROM unnest(_w_nths, _w_ids, _w_hosts, _w_attempts, _w_items, _w_workers)
                        w(nth, id, host, attempts, items, worker)
                    UNION ALL
                    SELECT n.nth, {LOST}, NULL, NULL, NULL, NULL, NULL FROM generate_subscripts(_token, 1) n(nth)
                ) e
                ORDER BY e.nth, e.id          -- null last
            ) e;
        _parents := _h.parents;
        _contacted := _h.contacted;
    END IF;
    IF {LOST} = ANY(_h.states) THEN  -- perhaps a repeated call whose answer was lost
        FOR _each IN
            SELECT u.nth FROM unnest(_h.states, _token, _fingerprint, _kind) WITH ORDINALITY
                u(state, token, fingerprint, kind, nth)
            CROSS JOIN LATERAL (
                SELECT q.id FROM request q WHERE q.run = _run AND q.fingerprint = u.fingerprint LIMIT 1) q
            CROSS JOIN LATERAL (SELECT o.id, o.token, o.state FROM outcome o WHERE o.id = q.id LIMIT 1) o
            WHERE u.state = {LOST} AND u.kind IS NULL AND o.token = u.token AND o.state = {DONE}
        LOOP
            _h.states[_each.nth] := {ALREADY_DONE};
        END LOOP;
    END IF;
    states := _h.states;
    IF _uploads THEN
        _incoming := register_stages(_run, _token, _h.states, _h.ids, _chunks, _staged);
    END IF;

    IF cardinality(_child) > 0 THEN
        IF _room IS NOT NULL THEN
            _redirects := ARRAY(SELECT u.id FROM unnest(_h.ids, _redirected) u(id, redirected) WHERE u.redirected);
        END IF;
        _new := enqueue(
            _run, _at, _hosts, _parents, _child_of, _child, _child_host, _child_rank, _child_url, _child_payload,
            _room, _limit, _redirects);
        _added := coalesce(cardinality(_new.ids), 0);
        _refused := coalesce(cardinality(_new.refused), 0);
    END IF;
    IF _h.hosts IS NOT NULL THEN
        _freed := free_hosts(_h.hosts, _contacted, _now);
        _is_shared := _freed.is_shared;
        _full := full_lanes(_freed.hosts);
        IF cardinality(_full) >= {MAX_FULL_LANES} THEN  -- perhaps not all: add those of the leases
            _full := ARRAY(
                SELECT unnest(_full)
                UNION
                SELECT l.id FROM unnest(_freed.hosts) u(host)
                CROSS JOIN LATERAL (SELECT l.id, l.place FROM lane l WHERE l.id = lane_key(_run, u.host) LIMIT 1) l
                WHERE l.place = {FULL});
        END IF;
    END IF;
    IF _added > 0 THEN
        PERFORM fill_lanes(_new.lanes || _full, _new.ranks, _new.ids);
    ELSIF cardinality(_full) > 0 THEN
        PERFORM fill_lanes(_full, NULL, NULL);
    END IF;
    IF cardinality(_full) > 0 THEN
        PERFORM place_lanes(_full, clock(_offset));
    END IF;

    IF cardinality(_reason) > 0 OR cardinality(_kind) > 0 THEN
        INSERT INTO event (request, at, worker, what, detail)
            SELECT u.id, _at, u.worker,
                CASE u.state WHEN {DONE} THEN {NOTE_EVENT} ELSE format({FAILED_EVENT}, u.attempts) END,
                coalesce(u.reason, '') || CASE u.state WHEN {WAITING} THEN coalesce(u.waits, '') ELSE '' END
            FROM unnest(_h.ids, _h.states, _h.workers, _h.attempts, _reason, _waits)
                u(id, state, worker, attempts, reason, waits)
            WHERE u.state IN ({WAITING}, {DEAD}) OR (u.state = {DONE} AND u.reason <> '');
    END IF;

    IF _added + _refused > 0 THEN
        added := array_fill(0, ARRAY[cardinality(_token)]);
        refused := added;
        FOR _each IN SELECT p.parent, count(*) AS n FROM unnest(_new.parents) p(parent) GROUP BY p.parent LOOP
            added[array_position(_parents, _each.parent)] := _each.n;
        END LOOP;
        IF _refused > 0 THEN
            FOR _each IN SELECT p.parent, count(*) AS n FROM unnest(_new.refused) p(parent) GROUP BY p.parent LOOP
                refused[array_position(_parents, _each.parent)] := _each.n;
            END LOOP;
        END IF;
    END IF;

    IF _is_shared THEN
        UPDATE presence p SET called = _now WHERE p.run = _run AND p.called < _now - 1;
    END IF;
    UPDATE ledger g SET
        pushed = g.pushed + _added + _refused, ready = g.ready + _added, waiting = g.waiting + _waiting,
        leased = g.leased - _waiting - _h.ended, done = g.done + _h.ended - _h.dead, dead = g.dead + _h.dead + _refused,
        duplicates = g.duplicates + _h.duplicates - _added - _refused, items = g.items + _h.new_items,
        incoming = g.incoming + _incoming, redirects = g.redirects + _h.redirects,
        item_errors = g.item_errors + _h.item_errors
        WHERE g.run = _run RETURNING g.items, g.incoming, g.done INTO _last, incoming, done;
    IF NOT FOUND THEN
        PERFORM refuse({NO_RUN}, 'the run was deleted');
    END IF;
    IF _h.new_items > 0 THEN
        INSERT INTO item (run, position, seq, token, fingerprint, payload)
            SELECT _run, _h.items[u.owner] + u.at, _last - _h.new_items + row_number() OVER (ORDER BY u.nth),
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
