-- Adding requests to the queue.

-- The numbers of these hosts, in the same order. Missing ones are created.
CREATE FUNCTION hosts_of(_names text[]) RETURNS integer[] LANGUAGE plpgsql AS $$
DECLARE
    _known integer[];
    _hosts integer[];
    _rows integer;
BEGIN
    LOOP
        _known := ARRAY(SELECT (SELECT h.id FROM host h WHERE h.name = u.name LIMIT 1) FROM unnest(_names) u(name));
        IF array_position(_known, NULL) IS NULL THEN
            RETURN _known;
        END IF;
        -- Numbered before they are inserted, so that they need not be looked up again.
        _hosts := ARRAY(
            SELECT coalesce(u.id, nextval('host_id_seq')::integer) FROM unnest(_known) WITH ORDINALITY u(id, nth)
            ORDER BY u.nth);
        INSERT INTO host (id, name) OVERRIDING SYSTEM VALUE
            SELECT u.id, u.name FROM unnest(_known, _hosts, _names) u(known, id, name) WHERE u.known IS NULL
            ORDER BY u.name COLLATE "C"
            ON CONFLICT (name) DO NOTHING;    -- the number is new
        GET DIAGNOSTICS _rows = ROW_COUNT;
        IF _rows = (SELECT count(*) FROM unnest(_known) u(id) WHERE u.id IS NULL) THEN
            RETURN _hosts;
        END IF;                               -- else another call created some of them
    END LOOP;
END
$$;

-- How many links may enter the queue; null: all. With a limit, one call at a time adds requests, until its commit. Call this
-- before any lock but that of the role.
CREATE FUNCTION room_for_links(_run integer, _limit bigint) RETURNS bigint LANGUAGE plpgsql AS $$
BEGIN
    IF _limit IS NULL THEN
        RETURN NULL;
    END IF;
    PERFORM pg_advisory_xact_lock('stage'::regclass::oid::integer, _run);
    RETURN (SELECT greatest(0, _limit - g.ready - g.waiting) FROM ledger g WHERE g.run = _run);
END
$$;

-- Store new requests and make them ready. The caller calls fill_lanes(). _owner: the index in _parents of the request that
-- each one came from; there 0 means none, -1 means that its children are ignored. With _room, only that many enter the
-- queue, in order. The others are dead, unless their parent is one of the _redirects.
CREATE FUNCTION enqueue(
    _run integer, _at double precision, _hosts text[], _parents bigint[], _owner integer[], _fingerprint bytea[],
    _host integer[], _rank double precision[], _url text[], _payload bytea[],
    _room bigint, _limit bigint, _redirects bigint[],
    OUT lanes bigint[], OUT ranks double precision[], OUT ids bigint[], OUT parents bigint[], OUT refused bigint[]
) LANGUAGE plpgsql AS $$
DECLARE
    _numbers integer[] := hosts_of(_hosts);
    _batch bigint := nextval('batch') << 24;
BEGIN
    WITH offered AS (
        -- Without the other columns: most links are known, and to unnest a column costs more than to index a variable.
        SELECT DISTINCT ON (u.fingerprint) u.fingerprint, u.nth
        FROM unnest(_fingerprint) WITH ORDINALITY u(fingerprint, nth)
        WHERE _parents[_owner[u.nth]] >= 0 ORDER BY u.fingerprint, u.nth
    ), fresh AS (
        INSERT INTO request (id, parent, rank, run, host, fingerprint, url, payload)
            SELECT _batch + o.nth, nullif(_parents[_owner[o.nth]], 0), nullif(_rank[o.nth], 0), _run,
                _numbers[_host[o.nth]], o.fingerprint, _url[o.nth], _payload[o.nth]
            FROM offered o
            LEFT JOIN LATERAL (
                SELECT true AS known FROM request q WHERE q.run = _run AND q.fingerprint = o.fingerprint LIMIT 1
            ) q ON true
            WHERE q.known IS NULL ORDER BY o.fingerprint  -- in one order, to avoid deadlocks
            ON CONFLICT (run, fingerprint) DO NOTHING
            RETURNING request.id, lane_key(_run, request.host) AS lane, coalesce(request.rank, 0) AS rank, request.parent
    ), queued AS (
        INSERT INTO ready (rank, id, at, lane) SELECT f.rank, f.id, _at, f.lane FROM fresh f WHERE _room IS NULL
    )
    SELECT array_agg(f.lane), array_agg(f.rank), array_agg(f.id), array_agg(f.parent)
        INTO lanes, ranks, ids, parents FROM fresh f;
    IF _room IS NULL THEN
        RETURN;
    END IF;
    WITH fresh AS (
        SELECT u.*, row_number() OVER (ORDER BY u.id) <= _room OR u.parent = ANY(_redirects) AS enters
        FROM unnest(lanes, ranks, ids, parents) u(lane, rank, id, parent)
    ), queued AS (
        INSERT INTO ready (rank, id, at, lane) SELECT f.rank, f.id, _at, f.lane FROM fresh f WHERE f.enters
    ), buried AS (
        INSERT INTO outcome (id, token, at, run, items, worker, seconds, status, attempts, state, kind, reason)
            SELECT f.id, 0, _at, _run, 0, 0, 0, 0, 0, {DEAD}, {FULL_KIND}, format({FULL_REASON}, _limit)
            FROM fresh f WHERE NOT f.enters
    )
    SELECT array_agg(f.lane) FILTER (WHERE f.enters), array_agg(f.rank) FILTER (WHERE f.enters),
        array_agg(f.id) FILTER (WHERE f.enters), array_agg(f.parent) FILTER (WHERE f.enters),
        array_agg(f.parent) FILTER (WHERE NOT f.enters)
        INTO lanes, ranks, ids, parents, refused FROM fresh f;
END
$$;

-- Lock a role. False if it is not held under this token. REWOUND if its cursor is neither the one that the client knows nor
-- the new one.
CREATE FUNCTION lock_role(_run integer, _role text, _token bigint, _known bytea, _cursor bytea)
RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    _stored bytea;
BEGIN
    SELECT r.cursor INTO _stored FROM role r WHERE r.run = _run AND r.role = _role AND r.token = _token FOR UPDATE;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    IF _stored NOT IN (_known, _cursor) THEN
        PERFORM refuse({REWOUND}, format('the cursor of %s has changed', _role));
    END IF;
    RETURN true;
END
$$;

-- Returns how many were new; null if the seed role was lost. QUEUE_FULL if the queue would have more than _max requests.
CREATE FUNCTION push(
    _run integer, _offset double precision, _receipt bigint, _receipt_token bigint,
    _max bigint, _role text, _token bigint, _known bytea, _cursor bytea,
    _hosts text[], _fingerprint bytea[], _host integer[], _rank double precision[], _url text[], _payload bytea[]
) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    _new record;
    _added integer;
    _queued bigint;
BEGIN
    PERFORM check_receipt(_run, _receipt, _receipt_token);
    IF _role IS NOT NULL AND NOT lock_role(_run, _role, _token, _known, _cursor) THEN
        RETURN NULL;
    END IF;
    IF _max IS NOT NULL THEN  -- check first, so that repeated refusals cost little
        PERFORM room_for_links(_run, (SELECT r.link_limit FROM run r WHERE r.id = _run));
        SELECT g.ready + g.waiting INTO _queued FROM ledger g WHERE g.run = _run;
        SELECT count(DISTINCT u.fingerprint) INTO _added FROM unnest(_fingerprint) u(fingerprint)
            LEFT JOIN LATERAL (
                SELECT 1 AS one FROM request q WHERE q.run = _run AND q.fingerprint = u.fingerprint LIMIT 1
            ) q ON true
            WHERE q.one IS NULL;
        IF _added > 0 AND _queued + _added > _max THEN
            PERFORM refuse({QUEUE_FULL}, 'the queue is full');
        END IF;
    END IF;
    SELECT * INTO _new FROM enqueue(
        _run, real_clock(_offset), _hosts, '{0}', array_fill(1, ARRAY[cardinality(_fingerprint)]),
        _fingerprint, _host, _rank, _url, _payload, NULL, NULL, NULL);
    _added := coalesce(cardinality(_new.ids), 0);
    IF _added > 0 THEN
        PERFORM fill_lanes(_new.lanes, _new.ranks, _new.ids);
    END IF;
    UPDATE ledger g SET pushed = g.pushed + _added, ready = g.ready + _added,
        duplicates = g.duplicates + cardinality(_fingerprint) - _added
        WHERE g.run = _run RETURNING g.ready + g.waiting INTO _queued;
    IF NOT FOUND THEN
        PERFORM refuse({NO_RUN}, 'the run was deleted');
    END IF;
    IF _added > 0 AND _queued > _max THEN
        PERFORM refuse({QUEUE_FULL}, 'the queue is full');
    END IF;
    IF _role IS NOT NULL THEN
        UPDATE role r SET cursor = _cursor WHERE r.run = _run AND r.role = _role;
    END IF;
    RETURN _added;
END
$$;
